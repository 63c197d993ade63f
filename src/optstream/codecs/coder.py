"""Encodes and decodes tensors of any size, chunk by chunk, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from optstream.codecs.base import Codec, Place

NUM_WORK = 2

_Chunk = tuple[Tensor, Sequence[Tensor], Place, Sequence[Tensor]]
"""Values, the parts that stand for them, their place, and the work space for them."""


@dataclass(frozen=True)
class Encoded:
    """Values as they are stored: the parts of an extent, or of a tile of it.

    Attributes:
        start: index of the first value in the flat parameter, a multiple of the codec's block.
    """

    codec: Codec
    parts: Sequence[Tensor]
    numel: int
    start: int = 0

    @staticmethod
    def of(codec: Codec, stored: Tensor, numel: int, start: int = 0) -> Encoded:
        """Return what an extent (uint8) holds, without a copy."""
        return Encoded(codec, codec.views(stored, numel), numel, start)

    def part(self, start: int, stop: int) -> Encoded:
        """Return some of the values; `start` counts from the first, in whole blocks."""
        parts = self.codec.slices(self.parts, start, stop)
        return Encoded(self.codec, parts, stop - start, self.start + start)


class Coder:
    """Has the work space for one device; one thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self._chunk = chunk_values(device.type)
        self._work = list(torch.empty(NUM_WORK, self._chunk, dtype=torch.float32, device=device))

    def encode(self, values: Tensor, target: Encoded, place: Place) -> None:
        """Write what stands for the values.

        Args:
            values: float32, flat.
            place: of all the values.
        """
        for chunk, parts, here, work in self._chunks(target, values, place):
            target.codec.encode(chunk, parts, here, work)

    def decode(self, source: Encoded, values: Tensor, place: Place) -> Tensor | None:
        """Write the values that stand there; return what Codec.decode does, for any of them."""
        changed = None
        for chunk, parts, here, work in self._chunks(source, values, place):
            found = source.codec.decode(parts, chunk, here, work)
            if found is not None:
                changed = found if changed is None else changed | found
        return changed

    def _chunks(self, encoded: Encoded, values: Tensor, place: Place) -> Iterator[_Chunk]:
        """Yield whole blocks, and last less than one."""
        codec = encoded.codec
        whole = encoded.numel // codec.block * codec.block
        bounds = [*range(0, whole, self._chunk), whole, encoded.numel]
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            work = self._work
            if stop - start < self._chunk:
                work = [space[: stop - start] for space in work]
            rounded = None if place.rounded is None else place.rounded[start:stop]
            here = Place(rounded, place.salt, encoded.start + start)
            yield values[start:stop], codec.slices(encoded.parts, start, stop), here, work


def chunk_values(device: str) -> int:
    """Return how many values are encoded at once: on a CPU they stay in a core's cache."""
    return 2**17 if device == "cpu" else 2**21


def coder_bytes(device: str) -> int:
    """Return what coding allocates on a device: the work space, and what operators make."""
    return (NUM_WORK + 2) * 4 * chunk_values(device)
