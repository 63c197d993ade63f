"""Encodes and decodes tensors of any size, chunk by chunk, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optstream.codecs.base import Codec, Place

NUM_WORK = 2


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
        self._work = torch.empty(NUM_WORK, self._chunk, dtype=torch.float32, device=device)

    def encode(self, values: Tensor, target: Encoded, place: Place) -> None:
        """Write what stands for the values.

        Args:
            values: float32, flat.
            place: of all the values.
        """
        for start, stop in self._chunks(target):
            part = target.part(start, stop)
            here = _at(place, part, start)
            part.codec.encode(values[start:stop], part.parts, here, self._work_for(part))

    def decode(self, source: Encoded, values: Tensor, place: Place) -> Tensor | None:
        """Write the values that stand there; return what Codec.decode does, for any of them."""
        changed = None
        for start, stop in self._chunks(source):
            part = source.part(start, stop)
            here = _at(place, part, start)
            found = part.codec.decode(part.parts, values[start:stop], here, self._work_for(part))
            changed = found if changed is None or found is None else changed | found
        return changed

    def _chunks(self, encoded: Encoded) -> Iterator[tuple[int, int]]:
        """Yield ranges of whole blocks, and last of less than one."""
        whole = encoded.numel // encoded.codec.block * encoded.codec.block
        for start in range(0, whole, self._chunk):
            yield start, min(start + self._chunk, whole)
        if whole < encoded.numel:
            yield whole, encoded.numel

    def _work_for(self, encoded: Encoded) -> Sequence[Tensor]:
        return [work[: encoded.numel] for work in self._work]


def chunk_values(device: str) -> int:
    """Return how many values are encoded at once: on a CPU they stay in a core's cache."""
    return 2**17 if device == "cpu" else 2**21


def coder_bytes(device: str) -> int:
    """Return what coding allocates on a device: the work space, and what operators make."""
    return (NUM_WORK + 2) * 4 * chunk_values(device)


def _at(place: Place, part: Encoded, start: int) -> Place:
    rounded = None if place.rounded is None else place.rounded[start : start + part.numel]
    return replace(place, rounded=rounded, start=part.start)
