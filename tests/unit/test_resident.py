"""Which windows stay in memory: the budget is used well, the choice saves about what it could."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from optstream.plan import NUM_SLOTS, OVERHEAD_BYTES, Plan
from optstream.plan.resident import choose_resident
from unit.test_plan import spec

SIZES: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda rng: 100,
    "matrices": lambda rng: rng.choice([64, 80, 96, 100]),
    "anything": lambda rng: rng.randrange(0, 101),
    "one is huge": lambda rng: rng.choice([100, 100, 100, 90, 400]),
}


def moved(sizes: Sequence[int], resident: set[int]) -> int:
    """Return what two steps move: both scans write all, and read all but what waits in slots."""
    streamed = [size for window, size in enumerate(sizes) if window not in resident]
    kept = min(NUM_SLOTS, len(streamed))
    return 4 * sum(streamed) - sum(streamed[:kept]) - sum(streamed[len(streamed) - kept :])


def least_moved(sizes: Sequence[int], budget: int) -> int:
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(len(sizes)), count) for count in range(len(sizes) + 1)
    )
    fitting = (set(c) for c in choices if sum(sizes[window] for window in c) <= budget)
    return min(moved(sizes, choice) for choice in fitting)


@pytest.mark.parametrize("kind", SIZES)
def test_the_choice_saves_nearly_all_that_can_be_saved(kind: str) -> None:
    rng = random.Random(0)
    saved = []
    for _ in range(30):
        sizes = [SIZES[kind](rng) for _ in range(rng.randrange(1, 10))]
        budget = int(sum(sizes) * rng.random())
        resident = choose_resident(sizes, NUM_SLOTS, budget)
        assert sum(sizes[window] for window in resident) <= budget
        all_moved, least = moved(sizes, set()), least_moved(sizes, budget)
        if least < all_moved:
            saved.append((all_moved - moved(sizes, resident)) / (all_moved - least))
    assert min(saved) > 0.7
    assert sum(saved) / len(saved) > (0.999 if kind == "equal" else 0.95)


def test_a_budget_is_filled() -> None:
    """The largest that fits, and so on, would leave 40 of 100 and 24 of 124 unused."""
    assert choose_resident([50, 60, 50], 0, 100) == {0, 2}
    assert choose_resident([1, 1000], 0, 1000) == {1}
    assert choose_resident([62, 50, 50, 62, 50], 0, 124) == {0, 3}


def test_at_the_ends_small_windows_let_larger_ones_into_the_slots() -> None:
    sizes = [10] * 4 + [60] * 10 + [10] * 4
    resident = choose_resident(sizes, NUM_SLOTS, 60)
    assert len(resident) == 6
    assert resident < {*range(4), *range(14, 18)}


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_equal_windows_are_spread_over_the_scan(share: float) -> None:
    """Else the drive would have nothing to do while those in memory are updated."""
    resident = choose_resident([10] * 200, NUM_SLOTS, int(2000 * share))
    assert len(resident) == int(200 * share)
    for start in range(0, 200, 20):
        here = resident & set(range(start, start + 20))
        assert abs(len(here) - 20 * share) <= 2


def test_everything_nothing_and_more() -> None:
    sizes = [3, 0, 5]
    assert choose_resident(sizes, NUM_SLOTS, 8) == {0, 1, 2}
    assert choose_resident(sizes, NUM_SLOTS, 10**15) == {0, 1, 2}
    assert choose_resident(sizes, NUM_SLOTS, 0) == set()
    assert choose_resident(sizes, NUM_SLOTS, -1) == set()
    assert choose_resident([], NUM_SLOTS, 5) == set()


def test_many_windows_take_no_time() -> None:
    rng = random.Random(0)
    sizes = [rng.randrange(50, 100) for _ in range(20_000)]
    start = time.perf_counter()
    resident = choose_resident(sizes, NUM_SLOTS, 400_000)
    assert time.perf_counter() - start < 5
    assert sum(sizes[window] for window in resident) > 399_000


def test_resident_windows_stay_resident_as_the_plan_grows() -> None:
    small, large = Plan(2**20).extended([spec("a", (2**18, 10))]), 3 * 2**20
    before = small.with_resident(large)
    assert (before.num_resident, before.resident_bytes) == (3, large)
    grown = before.extended([spec("b", (2**18, 10))])
    assert grown.resident == before.resident
    assert grown.with_resident(large).resident == before.resident
    assert grown.with_resident(large + 2**20).resident > before.resident
    assert grown.with_resident(0).resident == before.resident


def test_what_the_plan_says_of_resident_windows() -> None:
    plan = Plan(2**20).extended([spec("a", (2**18, 10))])
    assert (plan.num_windows, plan.num_resident, plan.resident_bytes) == (20, 0, 0)
    fixed = plan.bookkeeping_bytes + OVERHEAD_BYTES
    some = plan.with_resident(5 * 2**20 + 1)
    assert some.num_resident == 5
    assert some.peak_host_bytes == (5 + NUM_SLOTS) * 2**20 + fixed
    assert some.written_bytes_per_step == 15 * 2**20
    assert some.read_bytes_per_step == (15 - NUM_SLOTS) * 2**20
    almost = plan.with_resident(18 * 2**20)
    assert almost.peak_host_bytes == plan.data_bytes + fixed
    assert (almost.read_bytes_per_step, almost.written_bytes_per_step) == (0, 2 * 2**20)
    whole = plan.with_resident(2**30)
    assert (whole.num_resident, whole.resident_bytes) == (20, plan.data_bytes)
    assert whole.peak_host_bytes == plan.data_bytes + fixed
    assert whole.read_bytes_per_step == whole.written_bytes_per_step == whole.num_slots == 0


def test_the_windows_at_the_ends_are_those_that_move() -> None:
    """Whose reads the slots save; the last window is a small one here."""
    plan = Plan(2**20).extended([spec("a", (2**17 * 20 + 4096,))])
    ends = plan.windows[:NUM_SLOTS] + plan.windows[-NUM_SLOTS:]
    assert plan.read_bytes_per_step == plan.data_bytes - sum(w.data_bytes for w in ends) // 2
    plan = replace(plan, resident=frozenset({plan.num_windows - 1}))
    assert plan.read_bytes_per_step == (20 - NUM_SLOTS) * 2**20


def test_slots_are_as_large_as_what_moves_and_devices_hold_any_window() -> None:
    huge = spec("embedding", (2**10, 2**11), elementwise=False, device="cuda:0")
    others = [spec(f"m{i}", (2**18,), elementwise=False, device="cuda:0") for i in range(8)]
    plan = Plan(2**21).extended([*others[:4], huge, *others[4:]])
    assert plan.slot_bytes == plan.largest_bytes == 2**24
    resident = replace(plan, resident=frozenset({4}))
    assert (resident.slot_bytes, resident.largest_bytes) == (2**21, 2**24)
    assert resident.peak_device_bytes == plan.peak_device_bytes
    assert huge.dtype == torch.float32
