"""From `offload` to `close`: what the wrapped optimizer itself may do meanwhile, and the end.

The wrapped optimizer's state is in files, so that its own `step()` would start all of it anew, and
its own `state_dict()` would hold none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from optstream.distributed.place import Place, release
from optstream.errors import OffloadedError
from optstream.report import Reporter

if TYPE_CHECKING:
    from optstream.stream.background import Background
    from optstream.streamed.state import StreamedState

_BARRED = ("step", "state_dict", "load_state_dict")


def is_offloaded(optimizer: object) -> bool:
    """Tell whether an optimizer is wrapped now: its state is in a store that is open."""
    return bool(getattr(getattr(optimizer, "_offloaded", None), "alive", False))


def bar(optimizer: Optimizer) -> None:
    """Let the wrapped optimizer refuse what needs its state, as long as it is offloaded."""
    for name in _BARRED:
        method = getattr(optimizer, name)
        if not hasattr(method, "_barred"):  # an earlier wrap's bars are in force again
            setattr(optimizer, name, MethodType(_barred(name, method), optimizer))


def _barred(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the mark of a scheduler, which warns of a step that was replaced
    @wraps(method)
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_offloaded(optimizer):
            kind = type(optimizer).__name__
            raise OffloadedError(
                f"this {kind} is offloaded, its state is in files: call {name}() of the optimizer "
                "that offload() returned"
            )
        return method(*args, **kwargs)

    call._barred = True  # type: ignore[attr-defined]
    return call


def end(
    saving: Background,
    state: StreamedState,
    reporter: Reporter,
    places: Sequence[Place],
    owner: int,
) -> None:
    """Wait for the last writes, end the threads and remove the files."""
    # a forked child inherits the object, not the threads; the files are the parent's
    if os.getpid() == owner:
        try:
            saving.wait()
        finally:
            state.stream.close()
            reporter.close()
            release(places)
            state.ranks.close()
