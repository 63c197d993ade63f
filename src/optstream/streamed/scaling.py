"""A loss scale that the wrapped optimizer's own kernel divides out, as GradScaler arranges it.

torch's fused rules take gradients as they are, scaled: GradScaler sets `grad_scale` and `found_inf`
on the optimizer, calls `step()` also where gradients are infinite, and deletes both when it
returns. Unscaled before the step, gradients would have other bits wherever the scale is no power of
two: `x * (1 / scale)` is not `x / scale`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from optstream.distributed.ranks import Ranks

_NAMES = ("grad_scale", "found_inf")


def divides_scale(optimizer: Optimizer) -> bool:
    """Tell whether the rule takes scaled gradients, and the scale as its attribute.

    An older convention hands the scaler itself to `step`; such a rule gets unscaled gradients.
    """
    takes_scaler = "grad_scaler" in inspect.signature(type(optimizer).step).parameters
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not takes_scaler


class LossScale:
    """Hands what GradScaler set on the streamed optimizer on to the wrapped one, for a step."""

    def __init__(self, streamed: Optimizer, optimizer: Optimizer) -> None:
        self._on_streamed = vars(streamed)
        self._on_wrapped = vars(optimizer)
        self._of_failed: dict[str, Any] = {}

    def overflowed(self, ranks: Ranks) -> bool:
        """Tell whether gradients are infinite on any rank, so that the step must be skipped."""
        found_inf = self._on_streamed.get("found_inf")
        return found_inf is not None and any(ranks.gather(bool(found_inf)))

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """Set the scale on the wrapped optimizer while its windows are updated.

        GradScaler leaves its attributes behind where a step fails, and would multiply the scale by
        itself in the next call; they are taken away, and a bare `step()` that goes on uses them.
        """
        given = {key: self._on_streamed[key] for key in _NAMES if key in self._on_streamed}
        given = given or self._of_failed
        self._on_wrapped.update(given)
        try:
            yield
        except BaseException:
            self._of_failed = given
            for key in _NAMES:
                self._on_streamed.pop(key, None)
            raise
        finally:
            for key in given:
                self._on_wrapped.pop(key, None)
        self._of_failed = {}
