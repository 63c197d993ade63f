"""What state an optimizer will keep for a parameter, found without allocating it.

The optimizer's own step runs on parameters of the meta device, twice: what it leaves in `state` is
the layout, what it allocates on the way is the cost. Optimizers whose kernels know no meta device
are tried again with torch's FakeTensorMode, which is heavier to import (68 MB) and therefore
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.errors import UnsupportedOptimizerError
from optstream.layout.shell import (
    Shell,
    changed_values,
    copied_values,
    hyperparameters,
    is_streamed,
    kept_value,
)
from optstream.layout.tensorless import AllocationPeak, ItemAnswer, leaves
from optstream.plan import StateTensor, Temporaries


@dataclass(frozen=True)
class Layout:
    """What one parameter, as the optimizer sees it, needs.

    Attributes:
        tensors: what goes into windows, in the optimizer's own order.
        counters: keys of what else the optimizer keeps.
        temporaries: which of a call's temporaries live at the same time.
        first_bytes: peak of allocations in the first update, the new state included.
        temporary_bytes: peak of allocations in a later update.
        advances_group: the step changes the group's own values (a counter), not only the state.
    """

    tensors: tuple[StateTensor, ...]
    counters: tuple[str, ...]
    temporaries: Temporaries
    first_bytes: int
    temporary_bytes: int
    advances_group: bool


def find_layout(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    state: Mapping[str, Any],
    narrow: torch.dtype,
) -> Layout:
    """Find what `optimizer` keeps for a parameter of this shape, stride (elements) and dtype.

    Args:
        group: its param_group; only the hyperparameters are used.
        state: what is already there for it (a counter of 1000 may switch a rule); not changed.
        narrow: the parameter's own dtype; such state becomes `dtype` where there is a master.

    Raises:
        UnsupportedOptimizerError: the rule needs values, not shapes, or keeps tensors inside
        containers.
    """
    probe = _Probe(optimizer, group, shape, stride, dtype, state, narrow)
    try:
        with ItemAnswer():  # type: ignore[no-untyped-call]
            return probe.run("meta")
    except UnsupportedOptimizerError:
        raise
    except Exception as meta_error:
        try:
            return _run_fake(probe)
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} cannot be offloaded: what it keeps for a parameter "
                f"of shape {tuple(shape)} cannot be found without running it "
                f"({error or meta_error!r}); "
                "use it without offload"
            ) from error


def _run_fake(probe: _Probe) -> Layout:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # counters of existing state are real
    with FakeTensorMode(allow_non_fake_inputs=True), ItemAnswer():  # type: ignore[no-untyped-call]
        return probe.run("cpu")


class _Probe:
    """Two steps of a copy of the optimizer, on tensors without data."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        state: Mapping[str, Any],
        narrow: torch.dtype,
    ) -> None:
        self.optimizer = optimizer
        # capturable wants its device; it moves counters there and leaves the rest as it is
        self.group = hyperparameters(group) | (
            {"capturable": False} if "capturable" in group else {}
        )
        self.shape, self.stride, self.dtype = tuple(shape), tuple(stride), dtype
        self.state = state
        self.narrow = narrow

    def run(self, device: str) -> Layout:
        # fused kernels exist only for real devices; the state they keep is that of the plain rule
        fused = device == "meta" and self.group.get("fused")
        group = {**self.group, "fused": None, "foreach": False} if fused else dict(self.group)
        shell, first, later = self._two_steps(group, device, 1)
        _, _, later_of_four = self._two_steps(group, device, 4)
        kept = shell.state[shell.groups[0]["params"][0]]
        self._check_keys(shell)
        tensors = tuple(_state_tensors(kept, type(self.optimizer).__name__))
        counters = tuple(k for k, v in kept.items() if v is not None and not is_streamed(v))
        advances = bool(changed_values(group, shell.groups[0]) or shell.changed_attributes)
        if fused:
            state_bytes = sum(tensor.num_bytes for tensor in tensors)
            return Layout(tensors, counters, Temporaries.NONE, state_bytes, 0, advances)
        # a loop may still hold one parameter's temporaries while it makes the next one's
        if later_of_four > 3 * later:
            return Layout(tensors, counters, Temporaries.BATCHED, first, later, advances)
        return Layout(tensors, counters, Temporaries.ONE, first, later_of_four, advances)

    def _two_steps(self, group: dict[str, Any], device: str, count: int) -> tuple[Shell, int, int]:
        params = [self._param(device) for _ in range(count)]
        shell = Shell(self.optimizer, [{**copied_values(group), "params": params}])
        for param in params:
            shell.state[param].update(self._state(device))
        peaks = []
        for _ in range(2):
            with torch.no_grad(), AllocationPeak() as peak:
                shell.step()
            peaks.append(peak.peak_bytes)
        return shell, peaks[0], peaks[1]

    def _check_keys(self, shell: Shell) -> None:
        shared = [key for key in shell.state if not isinstance(key, Tensor)]
        if shared:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__} cannot be offloaded: its state {shared[0]!r} "
                "belongs to no parameter, and streaming sees a few parameters at a time; "
                "use it without offload"
            )

    def _param(self, device: str) -> torch.nn.Parameter:
        data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        param = torch.nn.Parameter(data)
        param.grad = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return param

    def _state(self, device: str) -> dict[str, Any]:
        # counters keep their values, but for those of a 0-dim parameter: they look like its state,
        # which with data would not mix with a gradient without
        return {
            key: torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=self.dtype if value.dtype == self.narrow else value.dtype,
                device=device,
            )
            if isinstance(value, Tensor) and (value.dim() > 0 or not self.shape)
            else kept_value(value, self.narrow, self.dtype)
            for key, value in self.state.items()
        }


def _state_tensors(state: Mapping[str, Any], optimizer: str) -> Iterator[StateTensor]:
    for key, value in state.items():
        if is_streamed(value):
            yield StateTensor(key, tuple(value.shape), tuple(value.stride()), value.dtype)
        elif not isinstance(value, Tensor) and any(map(is_streamed, leaves(value))):
            raise UnsupportedOptimizerError(
                f"{optimizer} cannot be offloaded: its state {key!r} keeps tensors inside a "
                f"{type(value).__name__}; use it without offload"
            )
