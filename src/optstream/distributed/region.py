"""What of a tensor a rank has, as indices: the arithmetic of parts that fit into each other.

tensor of 8 rows, 6 columns      Region: in each dimension the ranges that it takes
Shard(0), 2nd of 2 ranks         ((4, 8),), ((0, 6),)
Shard(0), Shard(1) on 2 x 2      ((4, 8),), ((0, 3),)
_StridedShard(0), 2nd of 2       ((2, 4), (6, 8)), ((0, 6),)
8 rows on 9 ranks, the last      (), ((0, 6),)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]
"""Indices from the first to before the second."""
Box = tuple[Range, ...]
"""One range in each dimension."""
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """Elements of a tensor: all combinations of what its ranges say in each dimension.

    Attributes:
        ranges: by dimension; none of them is empty, and they are in ascending order.
    """

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return all of a tensor of this shape."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of these elements put together."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def box(self, box: Box) -> Region:
        """Return a box of these elements, counted as they are put together."""
        sides = zip(self.ranges, box, strict=True)
        return Region(tuple(tuple(cut(ranges, *side)) for ranges, side in sides))

    def common(self, other: Region) -> Iterator[tuple[Slices, Slices]]:
        """Yield what both have: where it is in these elements, and where in the other's."""
        sides = zip(self.ranges, other.ranges, strict=True)
        runs = [list(_common(mine, theirs)) for mine, theirs in sides]
        for chosen in itertools.product(*runs):
            yield (
                tuple(slice(mine, mine + length) for mine, _, length in chosen),
                tuple(slice(theirs, theirs + length) for _, theirs, length in chosen),
            )

    def meets(self, other: Region) -> bool:
        """Tell whether both have some element."""
        return next(self.common(other), None) is not None


def cut(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """Yield ranges of the indices whose places in these ranges are from `start` to `stop`."""
    at = 0
    for first, last in ranges:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            yield first + low - at, first + high - at
        at += last - first


def _common(mine: Sequence[Range], theirs: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of indices that both have: place in mine, place in theirs, length."""
    my_place = 0
    for my_start, my_stop in mine:
        their_place = 0
        for start, stop in theirs:
            low, high = max(my_start, start), min(my_stop, stop)
            if low < high:
                yield my_place + low - my_start, their_place + low - start, high - low
            their_place += stop - start
        my_place += my_stop - my_start


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield, in order, the boxes that make up a range of a tensor's flat, row-major elements."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _within(shape, last, start - last * row, stop - last * row)
        return
    yield from _within(shape, first - 1, start - (first - 1) * row, row if start % row else 0)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _within(shape, last, 0, stop - last * row)


def _within(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield ((row, row + 1), *box)


@lru_cache(maxsize=1024)  # layers are alike
def cover(shape: tuple[int, ...], regions: tuple[Region, ...]) -> bool:
    """Tell whether regions have every element of a tensor exactly once."""
    return (
        all(_fits(region, shape) for region in regions)
        and sum(region.numel for region in regions) == math.prod(shape)
        and not any(a.meets(b) for a, b in itertools.combinations(regions, 2))
    )


def _fits(region: Region, shape: Sequence[int]) -> bool:
    return len(region.ranges) == len(shape) and all(
        _ascend(ranges, size) for ranges, size in zip(region.ranges, shape, strict=True)
    )


def _ascend(ranges: Sequence[Range], size: int) -> bool:
    ends = [0, *itertools.chain.from_iterable(ranges), size]
    return ends == sorted(ends) and all(start < stop for start, stop in ranges)
