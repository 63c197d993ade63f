"""What every rank knows of all ranks' parameters: who keeps each, and what lies in whose windows.

The parameters here are those of all ranks, by an index of their own; `Plan.params` has only those
that this rank keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optstream.distributed.ownership import Cost, assign

EVERY_RANK = -1
"""In place of an owner: a sharded parameter, of which each rank keeps its part."""

Place = tuple[int, int]
"""Of a parameter in `param_groups`: group, position."""


@dataclass(frozen=True, slots=True)
class Part:
    """What of a parameter a window updates; all of it, or a flat slice.

    Attributes:
        param: index in `Shares.places`.
        start, stop: flat elements.
    """

    param: int
    start: int
    stop: int


WindowParts = tuple[Part, ...]


@dataclass(frozen=True)
class Shares:
    """Who keeps what.

    Attributes:
        places: of each parameter, in the order they were planned.
        owners: the rank that keeps it, or EVERY_RANK.
        loads: what a step costs each rank.
        windows: of each rank, the parts in each window.
    """

    places: tuple[Place, ...]
    owners: tuple[int, ...]
    loads: tuple[Cost, ...]
    windows: tuple[tuple[WindowParts, ...], ...]

    @classmethod
    def none(cls, size: int) -> Shares:
        """Return the shares of so many ranks before any parameter is planned."""
        return cls((), (), (Cost(0, 0),) * size, ((),) * size)

    def owners_of(self, costs: Sequence[Cost], sharded: Sequence[bool]) -> list[int]:
        """Return who will keep more parameters, given what each rank has already."""
        whole = [index for index, is_sharded in enumerate(sharded) if not is_sharded]
        owners = [EVERY_RANK] * len(costs)
        for index, owner in zip(
            whole, assign([costs[index] for index in whole], self.loads), strict=True
        ):
            owners[index] = owner
        return owners

    def extended(
        self,
        places: Sequence[Place],
        owners: Sequence[int],
        costs: Sequence[Cost],
        windows: Sequence[Sequence[WindowParts]],
    ) -> Shares:
        """Return these shares with more parameters and, of each rank, more windows."""
        loads = list(self.loads)
        for owner, cost in zip(owners, costs, strict=True):
            if owner != EVERY_RANK:
                loads[owner] += cost
        return Shares(
            self.places + tuple(places),
            self.owners + tuple(owners),
            tuple(loads),
            tuple((*old, *new) for old, new in zip(self.windows, windows, strict=True)),
        )
