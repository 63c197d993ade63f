"""What the plans of all ranks come to on a node and in a day."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optstream.estimate.node import Node
from optstream.estimate.planning import NO_RAM, resized
from optstream.plan import Plan
from optstream.ram import MARGIN_SHARE, MIN_MARGIN_BYTES, Budget
from optstream.streamed.headers import window_files
from optstream.units import format_bytes

_SMALLEST_WINDOW_BYTES = 8 * 2**20
_DAY_S = 86400
_SPARE_FDS = 128


@dataclass(frozen=True)
class Check:
    """Something that a node has or has not.

    Attributes:
        what: is needed.
        needed, available: bytes, or files where `what` says so.
        advice: what to do where it does not fit; "" where it does.
    """

    what: str
    needed: int
    available: int
    advice: str

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


@dataclass(frozen=True)
class Estimate:
    """What plans come to.

    Attributes:
        plans: of each rank.
        node: what is known of it.
        ranks_per_node: ranks that share its drives and memory; the last node may have fewer.
        budget: of memory for windows that stay, as in the plans.
        step_s: seconds a whole step takes; None: not known.
        endurance_bytes: that may be written to the node's drives in their life; None: not known.
    """

    plans: Sequence[Plan]
    node: Node
    ranks_per_node: int
    budget: Budget = NO_RAM
    step_s: float | None = None
    endurance_bytes: int | None = None

    def most_of_a_node(self, figure: Callable[[Plan], int]) -> int:
        """Return the sum of a figure over a node's ranks, of the node that has the most."""
        values, size = [figure(plan) for plan in self.plans], self.ranks_per_node
        return max(sum(values[at : at + size]) for at in range(0, len(values), size))

    @cached_property
    def moved_bytes_per_step(self) -> int:
        """On the node that moves the most, both ways."""
        return self.most_of_a_node(
            lambda plan: plan.read_bytes_per_step + plan.written_bytes_per_step
        )

    @property
    def drive_s(self) -> float | None:
        """Seconds that a node's drives need for a step; the most that a step becomes longer."""
        rate = self.node.bytes_per_s
        return self.moved_bytes_per_step / rate if rate else None

    @property
    def written_bytes_per_day(self) -> float | None:
        """To a node's drives; a step takes no less than they need."""
        if self.step_s is None:
            return None
        written = self.most_of_a_node(lambda plan: plan.written_bytes_per_step)
        return written * _DAY_S / max(self.step_s, self.drive_s or 0)

    @property
    def endurance_days(self) -> float | None:
        """Until as much is written as the drives are rated for."""
        written = self.written_bytes_per_day
        return self.endurance_bytes / written if self.endurance_bytes and written else None

    @cached_property
    def checks(self) -> list[Check]:
        """What fits and what does not, as far as the node is known."""
        return list(self._checks())

    def spare_bytes(self, model_bytes: int) -> int:
        """Return the memory that `ram=` could have on each rank; 0 where that is not known.

        The margin is that of `ram="auto"`.

        Args:
            model_bytes: of weights and gradients in host memory.
        """
        memory_bytes = self.node.memory_bytes
        if memory_bytes is None:
            return 0
        margin_bytes = max(MIN_MARGIN_BYTES, math.floor(memory_bytes * MARGIN_SHARE))
        used_bytes = self.most_of_a_node(lambda plan: plan.peak_host_bytes + model_bytes)
        return max(0, memory_bytes - used_bytes - margin_bytes) // self.ranks_per_node

    def with_ram(self, num_bytes: int) -> Estimate:
        """Return what it comes to with so many bytes resident on each rank."""
        budget = Budget(num_bytes)
        plans = [resized(plan, plan.window_bytes, budget) for plan in self.plans]
        return replace(self, plans=plans, budget=budget)

    def _checks(self) -> Iterator[Check]:
        node = self.node
        if node.space_bytes is not None:
            state = self.most_of_a_node(drive_bytes)
            for times, what in ((1, "drive"), (2, "drive, with a checkpoint kept")):
                lacking = format_bytes(times * state - node.space_bytes)
                advice = f"free {lacking}, or give more drives or nodes"
                yield _check(what, times * state, node.space_bytes, advice)
        if node.memory_bytes is not None:
            needed = self.most_of_a_node(lambda plan: plan.peak_host_bytes)
            advice = self._smaller_window(node.memory_bytes) if needed > node.memory_bytes else ""
            yield _check("host memory", needed, node.memory_bytes, advice)
        if node.open_files is not None:
            needed = 2 * max(plan.num_windows for plan in self.plans) + _SPARE_FDS
            advice = "give a larger window, or raise ulimit -n"
            yield _check("open files of a process", needed, node.open_files, advice)

    def _smaller_window(self, memory_bytes: int) -> str:
        """Return the advice for too little memory: a window with which it is enough."""
        window_bytes = self.plans[0].window_bytes // 2
        while window_bytes >= _SMALLEST_WINDOW_BYTES:
            plans = [resized(plan, window_bytes, self.budget) for plan in self.plans]
            smaller = replace(self, plans=plans)
            if smaller.most_of_a_node(lambda plan: plan.peak_host_bytes) <= memory_bytes:
                return f"give --window {window_bytes >> 20}MiB"
            window_bytes //= 2
        less = "less --ram, " if any(plan.num_resident for plan in self.plans) else ""
        return f"no window is small enough; give {less}fewer ranks a node, or more memory"


def drive_bytes(plan: Plan) -> int:
    """Return the bytes of a rank's files, headers included."""
    return sum(file.file_bytes for file in window_files(plan))


def _check(what: str, needed: int, available: int, advice: str) -> Check:
    return Check(what, needed, available, advice if needed > available else "")
