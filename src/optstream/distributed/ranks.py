"""The ranks that share one optimizer's state; a single process is a group of one.

Every rank makes the same calls in the same order. A rank that fails says so where the others wait
for it next, so that all of them end there, and none hangs:

    rank 0   gather ---------- gather ------ raises RankError with rank 1's message
    rank 1   gather -- error -- fail ------- raises its own error
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from optstream.errors import ConfigError, OffloadError, RankError

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Failure:
    """What a rank that failed sends in place of a value."""

    message: str


class Ranks:
    """This process among those that share the state.

    Attributes:
        rank: of this process, among them.
        size: how many they are.
        num_on_host: how many of them run on this machine.
        members: they, as torch.distributed numbers them; empty without a process group.
        wait_s: running total of seconds in which this rank did nothing but wait for others.
        exchanged_bytes: running total of bytes broadcast, here or by others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make process groups for these ranks alone; all of them call it together.

        Raises:
            ConfigError: not a process group, or this process is no part of it.
        """
        self.rank, self.size, self.num_on_host = 0, 1, 1
        self.wait_s = 0.0
        self.exchanged_bytes = 0
        self.members: list[int] = []
        self._gone = ""
        self._group = group
        self._beside: Ranks | None = None
        self._messages: dist.ProcessGroup | None = None
        self._values: dist.ProcessGroup | None = None
        if group is None:
            return
        check_group(group)
        self.members = sorted(dist.get_process_group_ranks(group))
        self.rank, self.size = self.members.index(dist.get_rank()), len(self.members)
        if self.size > 1:
            # of its own, so that nothing the program sends meanwhile gets between
            self._messages = self._new_group("gloo")
            backend: str = dist.get_backend(group)
            if backend == dist.Backend.UNDEFINED:  # one a device
                backend = dist.get_backend_config(group)
            self._values = self._new_group(backend)
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            self.num_on_host = self.gather(boot).count(boot)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        part = self.size < dist.get_world_size()
        group: dist.ProcessGroup = dist.new_group(
            self.members, backend=backend, use_local_synchronization=part
        )
        return group

    # -- agreeing ----------------------------------------------

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, by rank.

        Raises:
            RankError: another rank has failed since the last call, or is gone.
        """
        return self._gather(value)

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that wait in `gather` that this one has failed."""
        with contextlib.suppress(RankError):  # others failed too, each with its own error
            self._gather(_Failure(describe(error)))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks: where it fails on one it fails on all; blocks may be nested.

        Raises:
            RankError: on the ranks where it did not fail, with the message of one where it did.
        """
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise
        self.gather(None)

    def tell(self, error: BaseException) -> None:
        """Call `fail`, unless that was done; of a RankError the others know."""
        if not isinstance(error, RankError) and not getattr(error, "_told_to_ranks", False):
            setattr(error, "_told_to_ranks", True)  # noqa: B010
            self.fail(error)

    def _gather(self, value: Any) -> list[Any]:
        if self._messages is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.waiting():
            dist.all_gather_object(found, value, group=self._messages)
        failures = [
            f"rank {rank} failed: {one.message}"
            for rank, one in enumerate(found)
            if isinstance(one, _Failure) and rank != self.rank
        ]
        if failures:
            raise RankError("; ".join(failures))
        return found

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what a block takes as waiting; what breaks in it is a rank that is gone."""
        if self._gone:
            raise RankError(self._gone)
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            self._gone = (
                f"rank {self.rank} cannot reach the other ranks, one of them is gone or does not "
                f"answer: {str(error).splitlines()[0]}"
            )
            raise RankError(self._gone) from error
        finally:
            self.wait_s += time.perf_counter() - start

    # -- moving values ----------------------------------------------

    def broadcast(self, values: Tensor, source: int) -> dist.Work:
        """Start overwriting every rank's `values` by the source's; in the same order on all."""
        self.exchanged_bytes += values.nbytes
        with self.waiting():
            work: dist.Work = dist.broadcast(
                values, self.members[source], group=self._values, async_op=True
            )
        return work

    def reduce(self, values: Tensor, target: int) -> dist.Work:
        """Start adding up every rank's `values` into the target rank's; elsewhere they are lost."""
        with self.waiting():
            work: dist.Work = dist.reduce(
                values, self.members[target], group=self._values, async_op=True
            )
        return work

    def add_up(self, values: Tensor) -> None:
        """Replace `values`, on the CPU, by their sum over the ranks, the same bits on all."""
        if self._messages is not None:
            with self.waiting():
                dist.all_reduce(values, group=self._messages)

    def beside(self) -> Ranks:
        """Return the same ranks for another thread, whose messages get between no others'.

        All ranks call it together the first time.
        """
        if self.size == 1:
            return self
        if self._beside is None:
            self._beside = Ranks(self._group)
        return self._beside

    def close(self) -> None:
        """Give the process groups up; the one they were made of stays."""
        if self._beside is not None:
            self._beside.close()
        groups, self._messages, self._values = [self._messages, self._values], None, None
        for group in groups:
            if group is not None and self._gone:
                # its threads may still wait for a rank that waits for us: destroying it would wait
                # for them, and the others learn of it when this process ends
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            elif group is not None and dist.is_initialized():
                with contextlib.suppress(ValueError):  # went with the default group
                    dist.destroy_process_group(group)


def check_group(group: object) -> None:
    """Raise ConfigError unless `group` is a process group with this process in it."""
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group={group!r} is no process group; give torch.distributed.group.WORLD "
            "after init_process_group(), or leave it None for a single process"
        )
    if dist.get_rank(group) < 0:
        raise ConfigError(
            f"process_group: rank {dist.get_rank()} is no part of it; "
            "give a group that has this process"
        )


def describe(error: BaseException) -> str:
    """Return an error in words for the ranks that did not have it."""
    return str(error) if isinstance(error, OffloadError) else f"{type(error).__name__}: {error}"
