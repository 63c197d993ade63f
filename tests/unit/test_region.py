"""Regions of tensors against the same taken with plain indices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optstream.checkpoint.parts import Assembled, Held, Source
from optstream.distributed.region import Range, Region, cover, flat_boxes


def taken(tensor: Tensor, region: Region) -> Tensor:
    for dim, ranges in enumerate(region.ranges):
        index = [i for start, stop in ranges for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.long))
    return tensor


def random_shape(rng: random.Random) -> list[int]:
    return [rng.randint(1, 7) for _ in range(rng.randint(0, 4))]


def split_dim(size: int, rng: random.Random) -> list[tuple[Range, ...]]:
    """Return a dimension's indices dealt out to a few holders, some in several ranges."""
    ends = sorted({0, size, *(rng.randint(0, size) for _ in range(3))})
    held: list[list[Range]] = [[] for _ in range(rng.randint(1, 3))]
    last = None
    for side in itertools.pairwise(ends):
        holder = rng.choice([i for i in range(len(held)) if i != last] or [0])
        if holder == last:
            held[holder][-1] = (held[holder][-1][0], side[1])
        else:
            held[holder].append(side)
        last = holder
    return [tuple(ranges) for ranges in held]


def partition(shape: Sequence[int], rng: random.Random) -> list[Region]:
    sides = [split_dim(size, rng) for size in shape]
    return [Region(ranges) for ranges in itertools.product(*sides)]


@pytest.mark.parametrize("seed", range(60))
def test_any_part_comes_from_any_shards(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    stored, wanted = partition(shape, rng), partition(shape, rng)
    assert cover(tuple(shape), tuple(stored))
    held = Held(Region.whole(shape), whole)
    sources = [Source(r, lambda r=r: taken(whole, r)) for r in stored]  # type: ignore[misc]
    for region in wanted:
        expected = taken(whole, region)
        assert torch.equal(held.of(region), expected)
        part = Assembled(region, torch.float32, sources)
        assert part.shape == region.shape == tuple(expected.shape)
        for _ in range(4):
            start, stop = sorted(rng.randint(0, region.numel) for _ in range(2))
            assert torch.equal(part.part(start, stop), expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_missing_or_there_twice_is_noticed(seed: int) -> None:
    rng = random.Random(seed)
    shape = (*(size + 1 for size in random_shape(rng)), 6)
    regions = [region for region in partition(shape, rng) if region.numel]
    one = rng.choice(regions)
    assert not cover(shape, tuple(region for region in regions if region != one))
    assert not cover(shape, (*regions, one))
    moved = Region((*one.ranges[:-1], ((5, 6 + one.shape[-1]),)))  # leads outside
    assert not cover(shape, tuple(moved if r == one else r for r in regions))
    if len(regions) > 1:
        twins = [region for region in regions if region.numel == one.numel and region != one]
        for twin in twins[:1]:
            assert not cover(shape, tuple(one if r == twin else r for r in regions))


def test_a_flat_range_is_few_boxes_however_large_the_tensor() -> None:
    shape = (8, 14336, 4096)
    boxes = list(flat_boxes(shape, 14336 * 4096 + 4096 * 7 + 5, 3 * 14336 * 4096 + 11))
    assert len(boxes) == 4
    assert sum(math.prod(b - a for a, b in box) for box in boxes) == 14336 * 4096 * 2 - 4096 * 7 + 6
