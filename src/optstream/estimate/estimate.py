"""The plan that `offload` would make, and what it comes to on a node and in a day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.optim import Optimizer

from optstream.errors import ConfigError
from optstream.estimate.node import Node
from optstream.headers import window_files
from optstream.params import Describer, parameter_names, unplanned
from optstream.plan import ParamSpec, Plan
from optstream.ram import Budget
from optstream.units import format_bytes

NONE = Budget()
MAX_WINDOWS = 100_000
_SMALLEST_WINDOW_BYTES = 8 * 2**20
_DAY_S = 86400
_SPARE_FDS = 128


def describe_all(model: nn.Module, optimizer: Optimizer, device: str) -> list[ParamSpec]:
    """Return what the plan is told of every parameter, as `offload` tells it.

    Args:
        model: may be on the meta device.
        device: where its parameters will be: "cpu", "cuda".

    Raises:
        UnsupportedOptimizerError: see `Describer.describe`.
    """
    describer = Describer(optimizer, master_weights=True, device=device)
    groups = optimizer.param_groups
    names = parameter_names(groups, model)
    return [
        describer.describe(names[id(groups[group]["params"][position])], group, position)
        for group, position in unplanned((), groups, {})
    ]


def make_plan(specs: Sequence[ParamSpec], window_bytes: int, budget: Budget = NONE) -> Plan:
    """Return the plan of parameters in windows of a size, some of which stay in memory.

    Raises:
        ConfigError: so many windows that no process could have a file for each.
    """
    state_bytes = sum(spec.state_bytes for spec in specs)
    if state_bytes > MAX_WINDOWS * window_bytes:
        raise ConfigError(
            f"{format_bytes(state_bytes)} of state are {state_bytes // window_bytes} windows of "
            f"{format_bytes(window_bytes)}, and each is an open file; give a larger --window"
        )
    plan = Plan(window_bytes).extended(specs)
    return plan.with_resident(budget.of(plan))


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
    """What one plan comes to.

    Attributes:
        plan: of one rank.
        node: what is known of it.
        ranks_per_node: ranks that share its drives and memory.
        step_s: seconds a whole step takes; None: not known.
        budget: of memory for windows that stay, as in the plan.
        endurance_bytes: that may be written to the node's drives in their life; None: not known.
    """

    plan: Plan
    node: Node
    ranks_per_node: int
    budget: Budget = NONE
    step_s: float | None = None
    endurance_bytes: int | None = None

    @cached_property
    def drive_bytes(self) -> int:
        """Of one rank's files, headers included."""
        return sum(file.file_bytes for file in window_files(self.plan))

    @property
    def moved_bytes_per_step(self) -> int:
        """Of one rank, both ways."""
        return self.plan.read_bytes_per_step + self.plan.written_bytes_per_step

    @property
    def drive_s(self) -> float | None:
        """Seconds that the node's drives need for a step; the most that a step becomes longer."""
        rate = self.node.bytes_per_s
        return self.ranks_per_node * self.moved_bytes_per_step / rate if rate else None

    @property
    def written_bytes_per_day(self) -> float | None:
        """To the node's drives; a step takes no less than they need."""
        if self.step_s is None:
            return None
        step_s = max(self.step_s, self.drive_s or 0)
        return self.ranks_per_node * self.plan.written_bytes_per_step * _DAY_S / step_s

    @property
    def endurance_days(self) -> float | None:
        """Until as much is written as the drives are rated for."""
        written = self.written_bytes_per_day
        return self.endurance_bytes / written if self.endurance_bytes and written else None

    @cached_property
    def checks(self) -> list[Check]:
        """What fits and what does not, as far as the node is known."""
        return list(self._checks())

    def _checks(self) -> Iterator[Check]:
        ranks, node = self.ranks_per_node, self.node
        if node.space_bytes is not None:
            for times, what in ((1, "drive"), (2, "drive, with a checkpoint kept")):
                needed = times * ranks * self.drive_bytes
                lacking = format_bytes(needed - node.space_bytes)
                advice = f"free {lacking}, or give more drives or nodes"
                yield _check(what, needed, node.space_bytes, advice)
        if node.memory_bytes is not None:
            needed = ranks * self.plan.peak_host_bytes
            yield _check("host memory", needed, node.memory_bytes, self._smaller_window())
        if node.open_files is not None:
            needed = 2 * self.plan.num_windows + _SPARE_FDS
            advice = "give a larger window, or raise ulimit -n"
            yield _check("open files of a process", needed, node.open_files, advice)

    def _smaller_window(self) -> str:
        """Return the advice for too little memory: a window with which it is enough."""
        assert self.node.memory_bytes is not None
        window_bytes = self.plan.window_bytes // 2
        while window_bytes >= _SMALLEST_WINDOW_BYTES:
            smaller = make_plan(self.plan.params, window_bytes, self.budget)
            if self.ranks_per_node * smaller.peak_host_bytes <= self.node.memory_bytes:
                return f"give --window {window_bytes >> 20}MiB"
            window_bytes //= 2
        less = "less --ram, " if self.plan.num_resident else ""
        return f"no window is small enough; give {less}fewer ranks a node, or more memory"


def _check(what: str, needed: int, available: int, advice: str) -> Check:
    return Check(what, needed, available, advice if needed > available else "")
