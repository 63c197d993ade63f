"""What `ram=` asks for: a budget for windows that stay in memory between steps."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from optstream.errors import ConfigError
from optstream.memory import read_available_bytes, read_total_bytes
from optstream.plan import Plan
from optstream.units import format_bytes, parse_bytes

MARGIN_SHARE = Fraction(1, 10)
MIN_MARGIN_BYTES = 2**30

_PERCENT = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*")
_FORMS = 'or a share of the optimizer\'s state ("25%"), or "auto"'


class Ram:
    """A budget in bytes, as a share of the optimizer's state, or what the machine has left.

    "auto" is what this process may still use, without swap, when the optimizer is wrapped, less the
    rest of the plan, less gradients of parameters on the CPU, less a margin: a tenth of all memory
    (or of the cgroup's limit), at least 1 GiB.
    """

    def __init__(self, ram: int | str) -> None:
        """Read what the user gave.

        Raises:
            ConfigError: not a budget, or more than this process may have.
        """
        self._given = ram
        self._share = Fraction(0)
        self._num_bytes = 0
        self._auto = isinstance(ram, str) and ram.strip().lower() == "auto"
        percent = _PERCENT.fullmatch(ram) if isinstance(ram, str) else None
        if percent is not None:
            self._share = Fraction(percent[1]) / 100
        elif not self._auto:
            self._num_bytes = _parse_bytes(ram)
        if self._share > 1:
            raise ConfigError(f"ram={ram!r}: give at most 100% of the optimizer's state")

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
        available_bytes = read_available_bytes()
        if needed_bytes > available_bytes:
            raise ConfigError(
                f"ram={self._given!r}: with {format_bytes(resident.resident_bytes)} of windows "
                f"resident, {format_bytes(needed_bytes)} of memory are needed and "
                f"{format_bytes(available_bytes)} are left to this process; give less, "
                '"auto" takes what can be spared'
            )
        return resident

    def _budget_bytes(self, plan: Plan, memory_bytes: int) -> int:
        if not self._auto:
            return self._num_bytes + math.floor(self._share * plan.data_bytes)
        margin_bytes = max(MIN_MARGIN_BYTES, math.floor(read_total_bytes() * MARGIN_SHARE))
        others_bytes = plan.peak_host_bytes - memory_bytes + _gradient_bytes(plan) + margin_bytes
        return plan.resident_bytes + read_available_bytes(swap=False) - others_bytes


def _parse_bytes(ram: int | str) -> int:
    try:
        num_bytes = parse_bytes(ram, "ram")
    except ConfigError as error:
        raise ConfigError(f"{error}, {_FORMS}") from error
    total_bytes = read_total_bytes()
    if num_bytes > total_bytes:
        raise ConfigError(
            f"ram={ram!r} is more than the {format_bytes(total_bytes)} of memory that this process "
            f"may have; give less, {_FORMS}"
        )
    return num_bytes


def _gradient_bytes(plan: Plan) -> int:
    specs = [spec for spec in plan.params if spec.device == "cpu"]
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)
