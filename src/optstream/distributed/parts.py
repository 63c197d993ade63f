"""Where the parts of a sharded tensor lie: which rank has which of it, the same on every rank.

They are held against each other: together they must be the tensor, each element once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from optstream.distributed.placements import region_at
from optstream.distributed.region import Region, cover
from optstream.distributed.shards import mesh_of, split_dims
from optstream.errors import UnsupportedOptimizerError


@dataclass(frozen=True)
class Parts:
    """The parts of one tensor.

    Attributes:
        shape: of the whole.
        ranks: that have it together, as torch.distributed numbers them; replicas are others.
        regions: what each of them has: at most one range in each dimension.
        here: this process's place among them.
        group: in which they talk; None is the default one.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    here: int
    group: dist.ProcessGroup | None

    @property
    def region(self) -> Region:
        """What this rank has."""
        return self.regions[self.here]

    @property
    def largest_numel(self) -> int:
        return max(region.numel for region in self.regions)

    def of(self, whole: Tensor, place: int) -> Tensor:
        """Return what the rank at a place has of the whole, as a view."""
        sides = self.regions[place].ranges
        return whole[tuple(slice(*side[0]) if side else slice(0) for side in sides)]

    def of_stack(self, count: int) -> Parts:
        """Return where the parts of so many members of a stack are."""
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            regions=tuple(_members(region, count) for region in self.regions),
        )


def parts_of(name: str, tensor: Tensor, *, stack: bool = False) -> Parts:
    """Return where the parts of a sharded DTensor are; nothing is sent.

    Args:
        stack: the first dimension counts members, and only those that this rank has a part of are
            meant: they are the whole, and the ranks that have parts of others are left out.

    Raises:
        UnsupportedOptimizerError: they are not one box a rank that make up the tensor; names it.
    """
    mesh, dims, shape = mesh_of(tensor), split_dims(tensor), tuple(tensor.shape)
    placements, place = tuple(tensor.placements), mesh.get_coordinate()  # type: ignore[attr-defined]
    if stack:
        dims = tuple(dim for dim in dims if placements[dim].dim != 0)
    others = tuple(slice(None) if dim in dims else index for dim, index in enumerate(place))
    ranks = tuple(mesh.mesh[others].flatten().tolist())
    regions = tuple(region_at(tensor, at) for at in _coordinates(mesh.shape, place, dims))
    here = ranks.index(dist.get_rank())
    part, found = tuple(tensor._local_tensor.shape), regions[here].shape  # type: ignore[attr-defined]
    if stack:
        shape = (found[0], *shape[1:])
        regions = tuple(_members(region, found[0]) for region in regions)
    if found != part or not (all(map(_is_box, regions)) and cover(shape, regions)):
        raise UnsupportedOptimizerError(
            f"{name} of shape {shape} with the placements {placements} on a mesh of "
            f"{tuple(mesh.shape)}: the parts (here {part}) are not one range of rows and columns a "
            "rank that make up the whole, so its matrices cannot be gathered; make its sizes "
            "multiples of the mesh's, or give it to use_muon=False"
        )
    # the ranks along several dimensions have no group of their own
    group = mesh.get_group(dims[0]) if len(dims) == 1 else None
    return Parts(shape, ranks, regions, here, group)


def _coordinates(
    mesh_shape: Sequence[int], place: Sequence[int], dims: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates along `dims` of the mesh, those of `place` elsewhere."""
    sides = (
        range(size) if dim in dims else (at,)
        for dim, (size, at) in enumerate(zip(mesh_shape, place, strict=True))
    )
    return itertools.product(*sides)


def _members(region: Region, count: int) -> Region:
    """Return the same region of so many members of a stack, counted from the first of them."""
    return Region((Region.whole((count,)).ranges[0], *region.ranges[1:]))


def _is_box(region: Region) -> bool:
    return all(len(ranges) <= 1 for ranges in region.ranges)
