"""What a rank has of a tensor that others stored in shards, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optstream.distributed.region import Region, flat_boxes


@dataclass(frozen=True)
class Held:
    """What is in memory of a tensor.

    Attributes:
        values: of the region's shape.
    """

    region: Region
    values: Tensor

    def of(self, region: Region) -> Tensor:
        """Return the values of a region that lies in this one: a view where it can be."""
        if region == self.region:
            return self.values
        places = list(region.common(self.region))
        if len(places) == 1:
            return self.values[places[0][1]]
        part = self.values.new_empty(region.shape)
        for there, here in places:
            part[there] = self.values[here]
        return part


@dataclass(frozen=True)
class Source:
    """A stored shard; `open` gives its values, in its shape."""

    region: Region
    open: Callable[[], Tensor]


class Assembled:
    """A tensor, or a rank's part of it, of which any range of elements can be had."""

    def __init__(self, region: Region, dtype: torch.dtype, sources: Sequence[Source]) -> None:
        """Take the shards that it meets; none is opened before it is needed."""
        self.shape = region.shape
        self._region, self._dtype = region, dtype
        self._sources = [source for source in sources if source.region.meets(region)]
        self._opened: dict[int, Tensor] = {}

    def part(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return flat elements of the part, in row-major order.

        Args:
            out: to be filled; None: memory is allocated.
        """
        flat = torch.empty(stop - start, dtype=self._dtype) if out is None else out
        end = 0
        for box in flat_boxes(self.shape, start, stop):
            region = self._region.box(box)
            self._fill(region, flat[end : end + region.numel].view(region.shape))
            end += region.numel
        return flat

    def _fill(self, region: Region, values: Tensor) -> None:
        for index, source in enumerate(self._sources):
            for here, there in region.common(source.region):
                if index not in self._opened:
                    self._opened[index] = source.open()
                values[here] = self._opened[index][there]
