"""Where the tensors of a window lie: in its buffer, in parameters, in the gradients' scratch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from optstream.bound import Bound
from optstream.distributed.shards import here
from optstream.plan import EXTENT_ALIGNMENT, Extent, Piece, Plan, aligned


def extent_view(buffer: Tensor, extent: Extent) -> Tensor:
    """Return the tensor that an extent of a window's data holds, without a copy."""
    return ExtentViews(buffer).view(extent)


class ExtentViews:
    """The tensors of one window's data; it is viewed as each of their dtypes only once."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._first_byte = int(buffer.storage_offset())
        self._typed: dict[torch.dtype, Tensor] = {}

    def view(self, extent: Extent) -> Tensor:
        """Return the tensor that an extent holds, without a copy."""
        typed = self._typed.get(extent.dtype)
        if typed is None:
            typed = self._typed[extent.dtype] = self._buffer.view(extent.dtype)
        start = (self._first_byte + extent.offset) // extent.dtype.itemsize
        return typed.as_strided(extent.shape, extent.stride, start)


def part_of(tensor: Tensor, piece: Piece, start: int = 0, stop: int | None = None) -> Tensor:
    """Return what of a parameter, or of a tensor of its shape, a piece is; a copy if `is_copied`.

    Args:
        start, stop: elements of the piece, if it is not whole; all of them by default.
    """
    if piece.whole:
        return tensor
    start += piece.start
    stop = piece.stop if stop is None else piece.start + stop
    if not tensor.is_contiguous():
        return _copied(tensor, start, stop)
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if stop - start == flat.numel() else flat[start:stop]


def is_copied(tensor: Tensor, piece: Piece) -> bool:
    """Tell whether a slice has to be copied: a gradient may be laid out as it likes."""
    return not piece.whole and not tensor.is_contiguous()


def _copied(tensor: Tensor, start: int, stop: int) -> Tensor:
    copy = tensor.new_empty(stop - start)
    rest = copy
    for part in _row_major(tensor, start, stop):
        rest[: part.numel()].view(part.shape).copy_(part)
        rest = rest[part.numel() :]
    return copy


def _row_major(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield views of the elements from start to stop, counted row by row whatever the strides."""
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    row = tensor.numel() // len(tensor)
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _row_major(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row_major(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from _row_major(tensor[last], 0, stop - last * row)


class Parted(Protocol):
    """A tensor that is elsewhere, of which flat elements, row by row, can be had."""

    shape: tuple[int, ...]

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements, flat."""


def given_part(value: Tensor | Parted, piece: Piece) -> Tensor:
    """Return what of given state, of this rank or of a DTensor, a piece is."""
    if isinstance(value, Tensor):
        return part_of(here(value).detach(), piece)
    part = value.part(piece.start, piece.stop)
    return part.view(value.shape) if piece.whole else part


class GradientScratch:
    """One float32 buffer a device, for the gradients of a window's parameters with masters."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    def spaces(
        self, plan: Plan, pieces: Sequence[Piece], bound: Mapping[int, Bound]
    ) -> Iterator[Tensor]:
        """Yield float32 space for the gradient of each piece with a master, in order."""
        used = 0
        for piece in pieces:
            if plan.params[piece.param].has_master:
                device = bound[piece.param].param.device
                yield self._buffer(device, plan.gradient_bytes)[used // 4 :]
                used += aligned(piece.numel * 4, EXTENT_ALIGNMENT)

    def _buffer(self, device: torch.device, num_bytes: int) -> Tensor:
        scratch = self._buffers.get(device)
        if scratch is None or scratch.nbytes < num_bytes:
            scratch = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
            self._buffers[device] = scratch
        return scratch
