"""Running without data: answer `.item()`, and count what would have been allocated."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ItemValue = bool | int | float


class ItemAnswer(TorchDispatchMode):
    """Answer `.item()` of a tensor without data; 0.5, since 1.0 divides by zero in NAdam."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and _has_no_data(args[0]):
            return _item(args[0].dtype)
        return func(*args, **(kwargs or {}))


class AllocationPeak(TorchDispatchMode):
    """Count the bytes of storages that come and go; `peak_bytes` is the most alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._tensors: dict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage_id(leaf) for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in leaves(result):
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


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor"


def _item(dtype: torch.dtype) -> ItemValue:
    if dtype == torch.bool:
        return True
    return 0.5 if dtype.is_floating_point else 1


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
