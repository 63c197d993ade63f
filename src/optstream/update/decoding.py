"""Encoded state of a window: decoded into scratch for the update of a tile, encoded back after it.

The scratch holds the tiles of one run; it is in float32 and as large as the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optstream.codecs import CODECS, EXACT, Coder, Encoded, Place, in_memory_order
from optstream.plan import MASTER, SCRATCH_ALIGNMENT, Extent, Piece, aligned
from optstream.update.views import extent_view, part_of


@dataclass(frozen=True)
class Decoded:
    """One state tensor of a tile, encoded in the window.

    Attributes:
        values: float32, in the order of memory.
        encoded: the same in the window.
    """

    values: Tensor
    encoded: Encoded


class Scratch:
    """Float32 space on one device, handed out from its start, and the coder for what is in it."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.coder = Coder(device)
        self._buffer = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def fits(self, num_bytes: int) -> bool:
        return self._used * 4 + num_bytes <= self._buffer.nbytes

    def take(self, numel: int) -> Tensor:
        """Return flat space that nobody else has until `clear`."""
        start = self._used
        self._used += aligned(numel * 4, SCRATCH_ALIGNMENT) // 4
        assert self._used * 4 <= self._buffer.nbytes
        return self._buffer[start : start + numel]

    def decode(self, decoded: Decoded, place: Place) -> Tensor | None:
        """Fill in the values; return what Codec.decode does."""
        return self.coder.decode(decoded.encoded, decoded.values, place)

    def encode(self, decoded: Decoded, place: Place) -> None:
        """Store the values as they are now."""
        self.coder.encode(decoded.values, decoded.encoded, place)

    def clear(self) -> None:
        self._used = 0


def tile_views(
    buffer: Tensor, piece: Piece, start: int, stop: int, scratch: Scratch
) -> tuple[dict[str, Tensor], dict[str, Decoded]]:
    """Return, by key, what the optimizer sees of a tile, and which of that is in the scratch.

    Args:
        start, stop: elements of the piece; all of it where it is whole.
    """
    views, decoded = {}, {}
    for extent in piece.extents:
        if extent.codec == EXACT:
            view = extent_view(buffer, extent)
            views[extent.key] = view if piece.whole else view[start:stop]
            continue
        encoded = encoded_extent(buffer, extent, piece.start)
        if not piece.whole:
            encoded = encoded.part(start, stop)
        values = scratch.take(encoded.numel)
        decoded[extent.key] = Decoded(values, encoded)
        views[extent.key] = (
            values.as_strided(extent.shape, extent.stride) if piece.whole else values
        )
    return views, decoded


def encoded_extent(buffer: Tensor, extent: Extent, start: int = 0) -> Encoded:
    """Return the encoded values of an extent of a window's data, without a copy."""
    data = buffer[extent.offset : extent.offset + extent.num_bytes]
    return Encoded.of(CODECS[extent.codec], data, extent.numel, start)


def stored_values(data: Tensor, extent: Extent, piece: Piece, param: Tensor) -> Tensor:
    """Return the values of an extent from its bytes in memory: flat, in the order of memory.

    Args:
        param: today's, whole; a master that is split belongs to it.
    """
    if extent.codec == EXACT:
        return data.view(extent.dtype)
    values = torch.empty(extent.numel, dtype=extent.dtype)
    rounded = None
    if extent.key == MASTER:
        rounded = in_memory_order(part_of(param.detach(), piece).cpu(), extent.stride)
    encoded = Encoded.of(CODECS[extent.codec], data, extent.numel, piece.start)
    Coder(values.device).decode(encoded, values, Place(rounded))
    return values
