"""The contract of a codec: float32 state as fewer bytes, a few thousand values at a time.

A codec's functions are pure: the bytes depend on the values and on where they are in their
parameter, never on the window, the slice or the tile that brought them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optstream.units import aligned

PART_ALIGNMENT = 64
"""Bytes; every part of an extent starts at a multiple of it."""


@dataclass(frozen=True)
class Part:
    """One of the arrays that encoded values become.

    Attributes:
        values: how many values share one element of it; counted from the parameter's start.
    """

    dtype: torch.dtype
    values: int = 1

    def count(self, numel: int) -> int:
        """Return how many elements it has for so many values."""
        return -(-numel // self.values)


@dataclass(frozen=True)
class Place:
    """Where values are in their parameter, and what a codec may know besides them.

    Attributes:
        rounded: the bfloat16 parameter that the values are the masters of, value for value; may be
            left out where they are encoded and the parameter is to be what they round to.
        salt: of the seed, the step and the tensor's name; random bits come from it and `start`.
        start: index of the first value in the flat parameter; Coder fills it in.
    """

    rounded: Tensor | None = None
    salt: int = 0
    start: int = 0


class Codec(ABC):
    """Float32 values <-> the arrays that are stored for them.

    `encode` and `decode` get flat tensors on one device: whole blocks of `block` values, or less
    than one block at the end of the parameter.

    Attributes:
        name: as it stands in window files and manifests.
        parts: the arrays, in the order in which an extent holds them.
        block: values that are encoded together.
        reader_dtype: what a reader of the file that knows no codecs sees.
    """

    name: str
    parts: tuple[Part, ...]
    block: int
    reader_dtype: torch.dtype = torch.uint8

    @abstractmethod
    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        """Write what stands for the values into the parts.

        Args:
            values: float32; not changed.
            parts: flat views of `self.parts`.
            work: flat float32 tensors as long as `values`, to be overwritten.
        """

    @abstractmethod
    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> Tensor | None:
        """Write the values that the parts stand for.

        Args:
            values: float32, to be overwritten.

        Returns:
            True (0-dim) if some values are those of `place.rounded`, widened, because that is not
            the parameter they were encoded with; None where there are none.
        """

    def offsets(self, numel: int) -> list[int]:
        """Return where the parts of so many values start in their extent, and where it ends."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(aligned(end, PART_ALIGNMENT))
            end = offsets[-1] + part.count(numel) * part.dtype.itemsize
        return [*offsets, end]

    def stored_bytes(self, numel: int) -> int:
        """Return the bytes of an extent for so many values."""
        return self.offsets(numel)[-1] if numel else 0

    def views(self, stored: Tensor, numel: int) -> list[Tensor]:
        """Return the parts of an extent (uint8) without a copy."""
        return [
            stored[offset : offset + part.count(numel) * part.dtype.itemsize].view(part.dtype)
            for offset, part in zip(self.offsets(numel), self.parts, strict=False)
        ]

    def slices(self, parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """Return the parts of some of the values; `start` is a multiple of `block`."""
        return [
            tensor[start // part.values : part.count(stop)]
            for tensor, part in zip(parts, self.parts, strict=True)
        ]


def rows(values: Tensor, block: int) -> Tensor:
    """Return whole blocks as rows, or less than one block as a row."""
    return values.view(-1, min(block, max(1, values.numel())))


def in_memory_order(param: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a parameter's elements as its state has them: flat, in the order of these strides."""
    if param.stride() != stride:  # it was moved into another memory format since
        param = torch.empty_strided(
            param.shape, stride, dtype=param.dtype, device=param.device
        ).copy_(param)
    return param.as_strided((param.numel(),), (1,))
