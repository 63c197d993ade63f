"""What state an optimizer will keep for a parameter, found without allocating it.

The optimizer's own step runs on parameters of the meta device, twice: what it leaves in `state` is
the layout, what it allocates on the way is the cost. Optimizers whose kernels know no meta device
are tried again with torch's FakeTensorMode, which is heavier to import (68 MB) and therefore
second.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from optstream.errors import UnsupportedOptimizerError
from optstream.plan import StateTensor, Temporaries

ItemValue = bool | int | float


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


def step_on(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]
) -> dict[str, Any]:
    """Let an optimizer step on other groups and state; it is the same as before afterwards.

    No hook runs: those belong to the whole step, and a subclass whose step calls its base's would
    run them there.

    Returns:
        the attributes that the step changed (a counter), by name.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    own = vars(optimizer)
    public = dict(own)
    given = {
        "param_groups": groups,
        "state": state,
        "_optimizer_step_pre_hooks": {},
        "_optimizer_step_post_hooks": {},
    }
    own.update(given)
    try:
        step(optimizer)
        return {
            key: value
            for key, value in own.items()
            if key not in given and (key not in public or value is not public[key])
        }
    finally:
        own.clear()
        own.update(public)


def is_streamed(value: object) -> bool:
    """Tell whether a state value goes into a window: tensors do, but for 0-dim ones (counters)."""
    return isinstance(value, Tensor) and value.dim() > 0


def kept_value(value: Any, narrow: torch.dtype, wide: torch.dtype) -> Any:
    """Return a copy of a counter, of a 0-dim parameter's state or of a Python value.

    Args:
        narrow, wide: what has the parameter's dtype gets its master's.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to(wide if value.dtype == narrow else value.dtype, copy=True)


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
        with _ItemAnswer():  # type: ignore[no-untyped-call]
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

    with FakeTensorMode(), _ItemAnswer():  # type: ignore[no-untyped-call]
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
            with torch.no_grad(), _AllocationPeak() as peak:
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
        return {
            key: torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=self.dtype if value.dtype == self.narrow else value.dtype,
                device=device,
            )
            if is_streamed(value)
            else kept_value(value, self.narrow, self.dtype)
            for key, value in self.state.items()
        }


class Shell:
    """A shallow copy of an optimizer with groups and state of its own."""

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.optimizer = copy.copy(optimizer)
        # copy.copy goes through torch's __getstate__, which keeps only groups, state and defaults
        self.optimizer.__dict__.update(optimizer.__dict__)
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self.changed_attributes: dict[str, Any] = {}

    def step(self) -> None:
        self.changed_attributes = step_on(self.optimizer, self.groups, self.state)
        vars(self.optimizer).update(self.changed_attributes)


def _state_tensors(state: Mapping[str, Any], optimizer: str) -> Iterator[StateTensor]:
    for key, value in state.items():
        if is_streamed(value):
            yield StateTensor(key, tuple(value.shape), tuple(value.stride()), value.dtype)
        elif not isinstance(value, Tensor) and any(map(is_streamed, _leaves(value))):
            raise UnsupportedOptimizerError(
                f"{optimizer} cannot be offloaded: its state {key!r} keeps tensors inside a "
                f"{type(value).__name__}; use it without offload"
            )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param_group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copied_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param_group's hyperparameters for a step that may change them in place."""
    return {
        key: value.clone()
        if isinstance(value, Tensor)
        else copy.copy(value)
        if isinstance(value, list | dict)
        else value
        for key, value in hyperparameters(group).items()
    }


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that a step added to its group or changed in it."""
    return {
        key: value
        for key, value in hyperparameters(after).items()
        if key not in before or not _equal(before[key], value)
    }


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is right or bool(left == right)


class _ItemAnswer(TorchDispatchMode):
    """Answer `.item()` of a tensor without data; 0.5, since 1.0 divides by zero in NAdam."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _has_no_data(args[0]):
            return _item(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor"


def _item(dtype: torch.dtype) -> ItemValue:
    if dtype == torch.bool:
        return True
    return 0.5 if dtype.is_floating_point else 1


class _AllocationPeak(TorchDispatchMode):
    """Count the bytes of storages that come and go; `peak_bytes` is the most alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._tensors: dict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage_id(leaf) for leaf in _leaves([args, kwargs]) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in _leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf, given)
        return result

    def _track(self, tensor: Tensor, given: set[int]) -> None:
        storage = _storage_id(tensor)
        if storage in given and storage not in self._tensors:
            return
        num_bytes = tensor.untyped_storage().nbytes()
        if self._tensors[storage] == 0:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._tensors[storage] += 1
        weakref.finalize(tensor, self._release, storage, num_bytes)

    def _release(self, storage: int, num_bytes: int) -> None:
        self._tensors[storage] -= 1
        if self._tensors[storage] == 0:
            self._live_bytes -= num_bytes
            del self._tensors[storage]


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
