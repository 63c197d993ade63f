"""Sends every window's new values to the other ranks while later windows are still on the drive.

All ranks know all scans, so that they start the same broadcasts in the same order:

    round 0    window of rank 0, window of rank 1, ...     the first of each one's scan
    round 1    window of rank 0, window of rank 1, ...     the second

A rank starts a round when it has updated its own window of it; what comes from others arrives while
it goes on. A rank that failed still takes part, with the values it has: nobody waits for it, and
all ranks hold equal parameters whatever happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from optstream.distributed.ranks import Ranks

PACKED_BYTES = 256 * 2**10
"""What is smaller travels with others in one buffer, of at most this size."""

MAX_UNDER_WAY = 32
EXCHANGE_BYTES = PACKED_BYTES * MAX_UNDER_WAY
"""The most memory that an exchange uses."""

Settle = Callable[[], None]
Values = Callable[[int, int], Iterable[Tensor]]


class Exchange:
    """The broadcasts of one step."""

    def __init__(self, ranks: Ranks, scans: Sequence[Sequence[int]], values: Values) -> None:
        """Plan it; nothing is sent yet.

        Args:
            scans: of each rank, the windows it updates, in order.
            values: gives the parameters' storage that a window of a rank updates, as flat tensors.
        """
        self._ranks = ranks
        self._scans = scans
        self._values = values
        self._round = 0
        self._under_way = UnderWay(ranks)

    def advance(self) -> None:
        """Send a window that was just updated: the next one of this rank's scan."""
        if self._ranks.size > 1:
            self._start_round()

    def finish(self) -> None:
        """Send what is left, as it is, and wait until all values are here.

        Raises:
            RankError: another rank is gone.
        """
        if self._ranks.size > 1:
            while self._round < max(map(len, self._scans)):
                self._start_round()
            self._under_way.wait()

    def _start_round(self) -> None:
        for rank, scan in enumerate(self._scans):
            if self._round < len(scan):
                for parcel in parcels(self._values(rank, scan[self._round])):
                    self._start(rank, parcel)
        self._round += 1

    def _start(self, rank: int, parcel: Sequence[Tensor]) -> None:
        packed = pack(parcel)
        work = self._ranks.broadcast(packed, rank)
        taken = rank != self._ranks.rank and packed is not parcel[0]
        self._under_way.add(work, (lambda: unpack(packed, parcel)) if taken else None)


class UnderWay:
    """Transfers that were started and not waited for, the oldest first, in bounded number."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._works: deque[tuple[dist.Work, Settle | None]] = deque()

    def add(self, work: dist.Work, settle: Settle | None) -> None:
        """Take a transfer, with what to do when it is through."""
        self._works.append((work, settle))
        if len(self._works) > MAX_UNDER_WAY:
            self._wait_oldest()

    def wait(self) -> None:
        """Wait for all of them."""
        while self._works:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        work, settle = self._works.popleft()
        with self._ranks.waiting():
            work.wait()
        if settle is not None:
            settle()


def parcels(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield what travels together, of one dtype and device: a large tensor, or several small."""
    parcel: list[Tensor] = []
    for tensor in tensors:
        if parcel and not _fits(parcel, tensor):
            yield parcel
            parcel = []
        parcel.append(tensor)
    if parcel:
        yield parcel


def _fits(parcel: Sequence[Tensor], tensor: Tensor) -> bool:
    return (
        sum(one.nbytes for one in parcel) + tensor.nbytes <= PACKED_BYTES
        and tensor.dtype == parcel[0].dtype
        and tensor.device == parcel[0].device
    )


def pack(parcel: Sequence[Tensor]) -> Tensor:
    """Return a parcel as one tensor: itself where it is one, else a copy."""
    return parcel[0] if len(parcel) == 1 else torch.cat(list(parcel))


def unpack(packed: Tensor, parcel: Sequence[Tensor]) -> None:
    """Copy what came into the tensors it is for."""
    for tensor, part in zip(
        parcel, packed.split([tensor.numel() for tensor in parcel]), strict=True
    ):
        tensor.copy_(part)


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's storage as a vector, whatever its strides."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor fills a range of its storage, without gaps and without overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
