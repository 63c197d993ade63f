"""What a `ram=` means: bytes, a share of the state, or what the machine can spare."""

from __future__ import annotations

import pytest

from optstream.errors import ConfigError
from optstream.plan import Plan
from optstream.ram import Ram
from unit.test_plan import spec

MIB, GIB = 2**20, 2**30
PLAN = Plan(MIB).extended([spec("a", (2**18, 10))])
"""20 windows of 1 MiB; the gradients take 10 MiB."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What this process may have, has left, and would have in swap."""
    sizes = {"total": 40 * GIB, "available": 30 * GIB, "swap": 5 * GIB}
    monkeypatch.setattr("optstream.ram.read_total_bytes", lambda: sizes["total"])

    def available(*, swap: bool = True) -> int:
        return sizes["available"] + (sizes["swap"] if swap else 0)

    monkeypatch.setattr("optstream.ram.read_available_bytes", available)
    return sizes


@pytest.mark.parametrize(
    ("ram", "num_resident"),
    [
        (0, 0),
        ("0", 0),
        ("0%", 0),
        (MIB - 1, 0),
        (7 * MIB, 7),
        ("7.5MiB", 7),
        ("25%", 5),
        (" 12.5 % ", 2),
        ("100%", 20),
        ("20MiB", 20),
        ("1GiB", 20),
        ("auto", 20),
        ("Auto", 20),
    ],
)
def test_budgets(ram: int | str, num_resident: int, memory: dict[str, int]) -> None:
    assert Ram(ram).keep_in(PLAN).num_resident == num_resident


@pytest.mark.parametrize(
    ("ram", "text"),
    [
        (-1, "ram=-1 is negative"),
        ("-1GiB", "ram='-1GiB' is not a size"),
        ("-5%", "ram='-5%' is not a size"),
        ("much", "ram='much' is not a size"),
        (0.25, "ram=0.25 is not a size"),
        (True, "ram=True is not a size"),
        (None, "ram=None is not a size"),
        ("101%", "ram='101%': give at most 100% of the optimizer's state"),
        ("41GiB", "ram='41GiB' is more than the 40.0 GiB of memory that this process may have"),
        (10**18, "is more than the 40.0 GiB of memory"),
    ],
)
def test_what_is_no_budget(ram: int | str, text: str, memory: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        Ram(ram)
    assert text in str(caught.value)


def test_forms_are_named_in_the_error(memory: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r'"64MiB".*share of the optimizer\'s state.*"auto"'):
        Ram("lots")


def test_more_than_is_left_is_refused_with_numbers(memory: dict[str, int]) -> None:
    memory |= {"available": 40 * MIB + PLAN.bookkeeping_bytes, "swap": 0}
    assert Ram("4MiB").keep_in(PLAN).num_resident == 4
    with pytest.raises(
        ConfigError,
        match=r"ram='8MiB': with 8\.0 MiB of windows resident, 44\.3 MiB of memory are needed and "
        r"40\.3 MiB are left",
    ):
        Ram("8MiB").keep_in(PLAN)
    assert Ram(0).keep_in(PLAN) == PLAN


def test_memory_that_is_in_use_is_not_needed_again(memory: dict[str, int]) -> None:
    memory |= {"available": 8 * MIB, "swap": 0}
    assert Ram("8MiB").keep_in(PLAN, PLAN.peak_host_bytes).num_resident == 8


def test_auto_leaves_the_rest_of_the_plan_gradients_and_a_margin(memory: dict[str, int]) -> None:
    others = PLAN.peak_host_bytes + 10 * MIB
    memory["available"] = 4 * GIB + others + 6 * MIB
    assert Ram("auto").keep_in(PLAN).num_resident == 6
    memory |= {"total": 4 * GIB, "available": GIB + others + 3 * MIB + 5}
    assert Ram("auto").keep_in(PLAN).num_resident == 3
    memory["available"] = 100
    assert Ram("auto").keep_in(PLAN) == PLAN


def test_auto_when_the_plan_grows_keeps_what_is_resident(memory: dict[str, int]) -> None:
    memory["available"] = 4 * GIB + PLAN.peak_host_bytes + 10 * MIB + 6 * MIB
    before = Ram("auto").keep_in(PLAN)
    grown = before.extended([spec("b", (2**18, 10))])
    more = grown.bookkeeping_bytes - before.bookkeeping_bytes
    memory["available"] = 4 * GIB + 20 * MIB + more + 2 * MIB
    after = Ram("auto").keep_in(grown, before.peak_host_bytes)
    assert after.resident > before.resident
    assert after.num_resident == 8
