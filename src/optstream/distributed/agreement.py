"""What ranks tell each other before they build on it: descriptions, and what a step will do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from optstream.bound import GradientOf
from optstream.distributed.ranks import Ranks
from optstream.distributed.shares import EVERY_RANK, Place, Shares
from optstream.errors import RankError


def check_same(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Refuse to go on unless all ranks have the same facts; only a digest travels if they do.

    Args:
        facts: what must be the same, by what to call it.

    Raises:
        RankError: on all ranks, with the first difference and who has what.
    """
    if ranks.size == 1:
        return
    digests = ranks.gather(_digest(facts))
    if len(set(digests)) == 1:
        return
    everyone = ranks.gather(dict(facts))
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in (*first, *theirs):
            here, there = first.get(name, "missing"), theirs.get(name, "missing")
            if here != there:
                raise RankError(
                    f"{name} is {here} on rank 0 and {there} on rank {rank}; build the same model "
                    "and optimizer with the same arguments on every rank"
                )


def _digest(facts: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(list(facts.items())).encode())


def group_facts(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the hyperparameters of all groups, as facts; tensors are left out.

    A scheduler that looks at one rank's own loss would make them differ.
    """
    return {
        f"{key!r} of group {index}": repr(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in ("params", "param_names") and not isinstance(value, Tensor)
    }


@dataclass(frozen=True)
class Turn:
    """What one rank will do in a step.

    Attributes:
        wanted: parameters that need state and have none yet.
        has_gradient: by index in `Shares.places`.
        windows: that it will update, in that order.
        gathered: the first parameter in each window that all ranks update together, in that order.
        digest: of the hyperparameters.
    """

    wanted: tuple[Place, ...]
    has_gradient: bytes
    windows: tuple[int, ...]
    gathered: tuple[int, ...]
    digest: str


def make_turn(
    shares: Shares,
    groups: Sequence[Mapping[str, Any]],
    wanted: Sequence[Place],
    windows: Sequence[int],
    gathered: Sequence[int],
    gradient_of: GradientOf,
) -> Turn:
    """Return this rank's turn, from today's gradients and hyperparameters."""
    has_gradient = bytes(
        gradient_of(groups[group]["params"][position]) is not None
        for group, position in shares.places
    )
    digest = _digest(group_facts(groups))
    return Turn(tuple(wanted), has_gradient, tuple(windows), tuple(gathered), digest)


def check_turns(
    ranks: Ranks,
    turns: Sequence[Turn],
    shares: Shares,
    groups: Sequence[Mapping[str, Any]],
    gathered: Collection[int] = (),
) -> None:
    """Refuse a step in which ranks would not do the same.

    Args:
        gathered: indices in `Shares.places` of the parameters that all ranks update together.

    Raises:
        RankError: hyperparameters differ, a gradient is missing where the parameter is kept, or
            ranks do not have the same updates before them.
    """
    if len({turn.digest for turn in turns}) > 1:
        check_same(ranks, group_facts(groups))
    for index, (place, owner) in enumerate(zip(shares.places, shares.owners, strict=True)):
        with_it = [rank for rank, turn in enumerate(turns) if turn.has_gradient[index]]
        keepers = range(ranks.size) if index in gathered else [] if owner == EVERY_RANK else [owner]
        without = [rank for rank in keepers if rank not in with_it]
        if with_it and without:
            raise RankError(
                f"parameter {place[1]} of group {place[0]} has a gradient on rank {with_it[0]} and "
                f"none on rank {without[0]}, which keeps its state; average gradients over the "
                "ranks before step(): train with DistributedDataParallel or fully_shard, or call "
                "reduce_to_owner()"
            )
    if len({turn.gathered for turn in turns}) > 1:
        left = [len(turn.gathered) for turn in turns]
        raise RankError(
            f"a step failed while ranks updated matrices together, and has left {left} windows of "
            "them on the ranks, which cannot go on with it; load a checkpoint"
        )
