"""Work on whole tensors of which every rank has a part: parts go to an owner, results come back.

Tensors are taken in rounds, one of each owner at a time, so that all ranks compute at once and each
has one whole tensor in memory:

    round 0    parts to the owners    each owner computes its first     parts of the results back
    round 1    parts to the owners    its second                        ...

Who owns what follows from costs and shapes, which are the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optstream.distributed.ownership import Cost, assign
from optstream.distributed.parts import Parts
from optstream.errors import RankError


class Task(Protocol):
    """What is to be done with one tensor.

    Attributes:
        parts: where it lies.
        cost: of the owner's work.
        device: of this rank's part, and of what it gets.
        result_dtype: of what `compute` returns.
    """

    parts: Parts
    cost: Cost
    device: torch.device
    result_dtype: torch.dtype

    def begin(self) -> Tensor:
        """Return this rank's part."""

    def compute(self, whole: Tensor) -> Tensor:
        """Return a result of the whole's shape; on the owner alone, which may overwrite it."""

    def end(self, result: Tensor) -> None:
        """Take this rank's part of the result."""


def run_on_owners(tasks: Sequence[Task]) -> None:
    """Do all tasks; the ranks of their tensors call it together, with the same ones in one order.

    Where computing fails the others are not left waiting: they get zeros as that result.

    Raises:
        RankError: another rank is gone.
        Exception: what computing raised here, when all rounds are through.
    """
    together: dict[object, list[Task]] = {}
    for task in tasks:
        together.setdefault((task.parts.ranks, task.parts.group), []).append(task)
    errors: list[Exception] = []
    for members in together.values():
        num_ranks = len(members[0].parts.ranks)
        for chosen in rounds([task.cost for task in members], num_ranks):
            _run_round({owner: members[index] for owner, index in chosen.items()}, errors)
    if errors:
        raise errors[0]


def rounds(costs: Sequence[Cost], num_ranks: int) -> Iterator[dict[int, int]]:
    """Yield the tasks of each round, by owner; of each owner the most expensive first."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    owners = assign(costs, [Cost(0, 0)] * num_ranks)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i].flops, i)):
        owned[owners[index]].append(index)
    for chosen in itertools.zip_longest(*owned):
        yield {owner: index for owner, index in enumerate(chosen) if index is not None}


def _run_round(tasks: Mapping[int, Task], errors: list[Exception]) -> None:
    here = next(iter(tasks.values())).parts.here
    whole = _gather(tasks, here)
    result: Tensor | None = None
    if whole is not None:
        result = _computed(tasks[here], whole, errors)
        whole = None
    for owner, part in _scatter(tasks, here, result).items():
        tasks[owner].end(part)


def _gather(tasks: Mapping[int, Task], here: int) -> Tensor | None:
    """Send this rank's parts to the owners; return the whole of what it owns."""
    mail, whole = _Mail(), None
    for owner, task in tasks.items():
        part = task.begin()
        if owner != here:
            mail.send(part, task.parts, owner)
            continue
        whole = part.new_empty(task.parts.shape)
        for place, box in enumerate(task.parts.boxes):
            if place == here:
                box.of(whole).copy_(part)
            else:
                mail.receive(box.of(whole), task.parts, place)
    mail.deliver()
    return whole


def _computed(task: Task, whole: Tensor, errors: list[Exception]) -> Tensor:
    try:
        return task.compute(whole)
    except Exception as error:
        errors.append(error)
        return torch.zeros_like(whole, dtype=task.result_dtype)


def _scatter(tasks: Mapping[int, Task], here: int, result: Tensor | None) -> dict[int, Tensor]:
    """Send the parts of this rank's result; return its own part of every result, by owner."""
    mail, found = _Mail(), {}
    for owner, task in tasks.items():
        if owner != here:
            found[owner] = torch.empty(
                task.parts.box.shape, dtype=task.result_dtype, device=task.device
            )
            mail.receive(found[owner], task.parts, owner)
            continue
        assert result is not None
        for place, box in enumerate(task.parts.boxes):
            if place == here:
                found[owner] = box.of(result)
            else:
                mail.send(box.of(result), task.parts, place)
    mail.deliver()
    return found


class _Mail:
    """Messages between ranks that travel at the same time; empty ones do not."""

    def __init__(self) -> None:
        self._messages: list[dist.P2POp] = []
        self._unpacked: list[tuple[Tensor, Tensor]] = []

    def send(self, part: Tensor, parts: Parts, place: int) -> None:
        if part.numel():
            self._add(dist.isend, part.contiguous(), parts, place)

    def receive(self, part: Tensor, parts: Parts, place: int) -> None:
        """Overwrite `part` by what comes, once it is delivered."""
        if part.numel():
            buffer = part
            if not part.is_contiguous():
                buffer = torch.empty_like(part, memory_format=torch.contiguous_format)
                self._unpacked.append((part, buffer))
            self._add(dist.irecv, buffer, parts, place)

    def _add(self, call: Callable[..., Any], buffer: Tensor, parts: Parts, place: int) -> None:
        self._messages.append(dist.P2POp(call, buffer, parts.ranks[place], parts.group))

    def deliver(self) -> None:
        """Wait until all messages are through.

        Raises:
            RankError: another rank is gone.
        """
        try:
            works = dist.batch_isend_irecv(self._messages) if self._messages else []
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RankError(
                f"rank {dist.get_rank()} cannot reach the ranks that have the other parts of its "
                f"parameters: {str(error).splitlines()[0]}"
            ) from error
        for part, buffer in self._unpacked:
            part.copy_(buffer)
