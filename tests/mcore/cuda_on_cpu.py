"""Run megatron-core, which insists on CUDA, on the CPU. For tests only.

Megatron-core makes its buffers with `device=torch.cuda.current_device()` or `device='cuda'`, knows
its parameters by `param.type() == 'torch.cuda.BFloat16Tensor'` and asks for the current CUDA stream
before every reduction of gradients. Without a GPU each of these raises. Inside `cuda_on_cpu()`

* `device='cuda'` means the CPU for every torch function, and so does `current_device()`;
* `tensor.cuda()` returns the tensor, `tensor.type()` answers as that of a CUDA tensor would;
* streams and events do nothing, and the CUDA random state is the CPU's;
* `all_gather` takes tensors of different sizes, as NCCL does and gloo does not.

Nothing is computed differently: kernels are torch's for the CPU, the process group must be gloo.
`torch.cuda.is_available()` and `Tensor.is_cuda` stay False. Redirected arguments and names hold in
the thread that entered the context and not inside a backward pass. It says nothing about speed,
overlap or CUDA's numerics.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_gloo_all_gather = torch.distributed.all_gather


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects device arguments and answers with the type names of CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


class _Idle:
    """A stream or an event on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Idle()

    def query(self) -> bool:
        return True


def _gather_uneven(gathered: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Gather flat tensors of any sizes, through padded ones of one size."""
    size = max(tensor.numel() for tensor in gathered)
    padded = own.new_zeros(size)
    padded[: own.numel()] = own
    received = [own.new_empty(size) for _ in gathered]
    _gloo_all_gather(received, padded, group=group)
    for tensor, whole in zip(gathered, received, strict=True):
        tensor.copy_(whole[: tensor.numel()].view(tensor.shape))


def _all_gather(
    gathered: list[torch.Tensor], own: torch.Tensor, group: Any = None, **more: Any
) -> Any:
    if len({tensor.numel() for tensor in gathered}) == 1:
        return _gloo_all_gather(gathered, own, group=group, **more)
    return _gather_uneven(gathered, own, group)


def _patches() -> Iterator[tuple[Any, str, Any]]:
    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    cuda = torch.cuda
    yield cuda, "current_device", lambda: CPU
    yield cuda, "set_device", lambda device: None
    yield cuda, "synchronize", lambda device=None: None
    yield cuda, "current_stream", lambda device=None: _Idle()
    yield cuda, "stream", lambda stream: contextlib.nullcontext()
    yield cuda, "Stream", _Idle
    yield cuda, "Event", _Idle
    yield cuda, "manual_seed", torch.manual_seed
    for module in (cuda, cuda.random):
        yield module, "get_rng_state", get_state
        yield module, "set_rng_state", set_state
    yield torch.distributed, "all_gather", _all_gather
    # megatron-core keeps its own setter, which talks to the CUDA generators
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        yield tracker, "_set_cuda_rng_state", set_state


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Enter it when megatron.core is imported."""
    with contextlib.ExitStack() as stack:
        for owner, name, substitute in _patches():
            stack.enter_context(mock.patch.object(owner, name, substitute))
        stack.enter_context(_CudaMeansCpu())
        yield
