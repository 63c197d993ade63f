"""What `ram=` asks for: a budget for windows that stay in memory between steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from optstream.errors import ConfigError
from optstream.memory import read_available_bytes, read_total_bytes
from optstream.plan import Plan
from optstream.units import format_bytes, parse_bytes

MARGIN_SHARE = Fraction(1, 10)
MIN_MARGIN_BYTES = 2**30

_PERCENT = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*")
_SHARE = 'or a share of the optimizer\'s state ("25%")'


@dataclass(frozen=True)
class Budget:
    """Memory for windows that stay: bytes, or a share of the optimizer's state."""

    num_bytes: int = 0
    share: Fraction = Fraction(0)

    def of(self, plan: Plan) -> int:
        """Return the bytes that a plan's windows may take."""
        return self.num_bytes + math.floor(self.share * plan.data_bytes)


def parse_budget(ram: int | str) -> Budget:
    """Return what a size, or a text such as "25%", stands for.

    Raises:
        ConfigError: neither of them, or more than all of the state.
    """
    percent = _PERCENT.fullmatch(ram) if isinstance(ram, str) else None
    if percent is None:
        try:
            return Budget(parse_bytes(ram, "ram"))
        except ConfigError as error:
            raise ConfigError(f"{error}, {_SHARE}") from error
    share = Fraction(percent[1]) / 100
    if share > 1:
        raise ConfigError(f"ram={ram!r}: give at most 100% of the optimizer's state")
    return Budget(share=share)


class Ram:
    """A budget in bytes, as a share of the optimizer's state, or what the machine has left.

    "auto" is what this process may still use, without swap, when the optimizer is wrapped, less the
    rest of the plan, less gradients of parameters on the CPU, less a margin: a tenth of all memory
    (or of the cgroup's limit), at least 1 GiB.
    """

    def __init__(self, ram: int | str, num_sharing: int = 1) -> None:
        """Read what the user gave.

        Args:
            num_sharing: ranks that take their share of this machine's memory.

        Raises:
            ConfigError: not a budget, or more than this process may have.
        """
        self._given = ram
        self._num_sharing = num_sharing
        self._budget: Budget | None = None
        if isinstance(ram, str) and ram.strip().lower() == "auto":
            return
        try:
            self._budget = parse_budget(ram)
        except ConfigError as error:
            raise ConfigError(f'{error}, or "auto"') from error
        total_bytes = read_total_bytes()
        if self._budget.num_bytes > total_bytes:
            raise ConfigError(
                f"ram={ram!r} is more than the {format_bytes(total_bytes)} of memory that this "
                f'process may have; give less, {_SHARE}, or "auto"'
            )

    def keep_in(self, plan: Plan, memory_bytes: int = 0) -> Plan:
        """Return a plan with as many of its windows resident as the budget allows.

        Args:
            memory_bytes: what of `plan.peak_host_bytes` is in use already.

        Raises:
            ConfigError: there is not so much memory.
        """
        resident = plan.with_resident(self._budget_bytes(plan, memory_bytes))
        if resident.num_resident == plan.num_resident:
            return plan
        needed_bytes = resident.peak_host_bytes - memory_bytes
        available_bytes = read_available_bytes() // self._num_sharing
        if needed_bytes > available_bytes:
            raise ConfigError(
                f"ram={self._given!r}: with {format_bytes(resident.resident_bytes)} of windows "
                f"resident, {format_bytes(needed_bytes)} of memory are needed and "
                f"{format_bytes(available_bytes)} are left to this process; give less, "
                '"auto" takes what can be spared'
            )
        return resident

    def _budget_bytes(self, plan: Plan, memory_bytes: int) -> int:
        if self._budget is not None:
            return self._budget.of(plan)
        margin_bytes = max(MIN_MARGIN_BYTES, math.floor(read_total_bytes() * MARGIN_SHARE))
        margin_bytes //= self._num_sharing
        others_bytes = plan.peak_host_bytes - memory_bytes + _gradient_bytes(plan) + margin_bytes
        available_bytes = read_available_bytes(swap=False) // self._num_sharing
        return plan.resident_bytes + available_bytes - others_bytes


def _gradient_bytes(plan: Plan) -> int:
    specs = [spec for spec in plan.params if spec.device == "cpu"]
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)
