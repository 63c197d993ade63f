"""Where the parts of a sharded tensor lie: which rank has which box of it, the same on every rank.

Boxes are torch's own (of FSDP2, of tensor parallelism, of one over the other) and are held against
each other: together they must be the tensor, each element once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from optstream.distributed.shards import mesh_of, split_dims
from optstream.errors import UnsupportedOptimizerError


@dataclass(frozen=True)
class Box:
    """A range of elements in each dimension of a tensor; empty where a rank has nothing."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return what it is of a tensor, as a view."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]


@dataclass(frozen=True)
class Parts:
    """The parts of one tensor.

    Attributes:
        shape: of the whole.
        ranks: that have it together, as torch.distributed numbers them; replicas are others.
        boxes: what each of them has.
        here: this process's place among them.
        group: in which they talk; None is the default one.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    here: int
    group: dist.ProcessGroup | None

    @property
    def box(self) -> Box:
        """What this rank has."""
        return self.boxes[self.here]

    @property
    def largest_numel(self) -> int:
        return max(box.numel for box in self.boxes)

    def of_stack(self, count: int) -> Parts:
        """Return where the parts of so many members of a stack are."""
        boxes = (Box(box.offset, (count, *box.shape[1:])) for box in self.boxes)
        return replace(self, shape=(count, *self.shape[1:]), boxes=tuple(boxes))


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
    boxes = _boxes(shape, tuple(mesh.shape), tuple(place), dims, placements)
    here = ranks.index(dist.get_rank())
    part = tuple(tensor._local_tensor.shape)  # type: ignore[attr-defined]
    if stack:
        shape = (boxes[here].shape[0], *shape[1:])
        boxes = tuple(Box((0, *box.offset[1:]), box.shape) for box in boxes)
    if boxes[here].shape != part or not _make_up(boxes, shape):
        raise UnsupportedOptimizerError(
            f"{name} of shape {shape} with the placements {placements} on a mesh of "
            f"{tuple(mesh.shape)}: the parts (here {part}) are not one range of rows and columns a "
            "rank that make up the whole, so its matrices cannot be gathered; make its sizes "
            "multiples of the mesh's, or give it to use_muon=False"
        )
    # the ranks along several dimensions have no group of their own
    group = mesh.get_group(dims[0]) if len(dims) == 1 else None
    return Parts(shape, ranks, boxes, here, group)


@cache
def _boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    place: tuple[int, ...],
    dims: tuple[int, ...],
    placements: tuple[Any, ...],
) -> tuple[Box, ...]:
    """Return the box of each rank along `dims` of the mesh, this one's coordinates elsewhere."""
    # torch's public function knows the box of this rank only
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as box_at

    boxes = []
    for indices in itertools.product(*(range(mesh_shape[dim]) for dim in dims)):
        at = list(place)
        for dim, index in zip(dims, indices, strict=True):
            at[dim] = index
        part, offset = box_at(shape, mesh_shape, at, placements)
        boxes.append(Box(tuple(offset), tuple(part)))
    return tuple(boxes)


@cache
def _make_up(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether boxes cover a shape, each element once."""
    held = [box for box in boxes if box.numel]
    return (
        sum(box.numel for box in held) == math.prod(shape)
        and all(_inside(box, shape) for box in held)
        and not any(_overlap(a, b) for a, b in itertools.combinations(held, 2))
    )


def _inside(box: Box, shape: Sequence[int]) -> bool:
    sides = zip(box.offset, box.shape, shape, strict=True)
    return all(at >= 0 and at + num <= size for at, num, size in sides)


def _overlap(a: Box, b: Box) -> bool:
    sides = zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    return all(at < other + more and other < at + num for at, num, other, more in sides)
