"""What of a DTensor each rank of its mesh has, from its placements; nothing is sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from optstream.distributed.region import Range, Region, cut
from optstream.distributed.shards import mesh_of
from optstream.errors import CheckpointError


def region_of(name: str, tensor: Tensor) -> Region:
    """Return what of a tensor this rank has: all of it, unless it is a sharded DTensor.

    Raises:
        CheckpointError: it is not where its placements say; the message has its name.
    """
    if not hasattr(tensor, "placements"):
        return Region.whole(tensor.shape)
    coordinate = mesh_of(tensor).get_coordinate()
    region = None if coordinate is None else _region_at(tensor, coordinate)
    part = tuple(tensor.to_local().shape)  # type: ignore[attr-defined]
    if region is None or region.shape != part:
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} has {part} on this rank, which is not what its "
            f"placements {tensor.placements} say; make its sizes multiples of the mesh's"
        )
    return region


def all_regions(tensor: Tensor) -> set[Region]:
    """Return what the ranks of its mesh have of a tensor, the same on all of them."""
    if not hasattr(tensor, "placements"):
        return {Region.whole(tensor.shape)}
    sizes = (range(mesh_of(tensor).size(dim)) for dim in range(mesh_of(tensor).ndim))
    return {_region_at(tensor, coordinate) for coordinate in itertools.product(*sizes)}


def _region_at(tensor: Tensor, coordinate: Sequence[int]) -> Region:
    ranges = list(Region.whole(tensor.shape).ranges)
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, count, index = placement.dim, mesh_of(tensor).size(mesh_dim), coordinate[mesh_dim]
        # torch's _StridedShard: what a later dimension of the mesh splits first
        strides = getattr(placement, "split_factor", 1)
        chunks = [_chunk(ranges[dim], strides, at) for at in range(strides)]
        ranges[dim] = tuple(part for chunk in chunks for part in _chunk(chunk, count, index))
    return Region(tuple(_joined(dim) for dim in ranges))


def _chunk(ranges: Sequence[Range], count: int, index: int) -> tuple[Range, ...]:
    """Return one of so many parts, of the sizes that torch.chunk makes."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // count)
    return tuple(cut(ranges, index * size, min((index + 1) * size, total)))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def like(values: Tensor, param: Tensor) -> Tensor:
    """Return values of a rank's part of a parameter as the parameter is: a DTensor if it is one."""
    if not hasattr(param, "placements") or values.shape != param.to_local().shape:  # type: ignore[attr-defined]
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        mesh_of(param),
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
