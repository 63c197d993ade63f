"""`plan.peak_host_bytes` is a promise: from wrapping to the last step, however large the state.

pytest tests/memory -m slow --log-cli-level=INFO     shows what was measured
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from memory.measure import CASES

MIB = 2**20
NUM_STEPS = {"adamw-fused": 10, "adamw-for": 10}
FEW_STEPS = 4
SMALL = "adamw-fused-small"
CODED = {name for name, case in CASES.items() if case.codec != "exact"}
FACTOR = 20
"""The state is at least so many times the bound, so that holding a part of it would show."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Bytes above model and gradients, as measure.py prints them."""

    bound: int
    bookkeeping: int
    state: int
    num_windows: int
    resident: int
    wrapping: int
    steps: list[int]
    saving: int
    loading: int
    closed: int


def measure(
    case: str, directory: Path, state_mib: int, window: str, num_steps: int, ram: str = "0"
) -> Measured:
    script = Path(__file__).with_name("measure.py")
    arguments = [case, state_mib, window, num_steps, ram, directory]
    result = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",
        },
    )
    measured = Measured(**json.loads(result.stdout))
    log.info(
        "%s: bound %.1f, wrapping %.1f, steps %s, saving %.1f, loading %.1f, closed %.1f, "
        "%.1f resident of state %.1f MiB in %d windows",
        case,
        measured.bound / MIB,
        measured.wrapping / MIB,
        [round(num_bytes / MIB, 1) for num_bytes in measured.steps],
        measured.saving / MIB,
        measured.loading / MIB,
        measured.closed / MIB,
        measured.resident / MIB,
        measured.state / MIB,
        measured.num_windows,
    )
    return measured


def check(measured: Measured) -> None:
    assert measured.wrapping <= measured.bound
    assert measured.steps[0] <= measured.bound
    assert max(measured.steps) <= measured.bound
    assert measured.saving <= measured.bound
    assert measured.loading <= measured.bound
    # objects of hundreds of windows and the allocator's slack are left, buffers are not
    assert measured.closed <= measured.bound * 2 // 3


def test_a_small_state(tmp_path: Path) -> None:
    measured = measure("adamw-fused", tmp_path, 64, "1MiB", 5)
    check(measured)
    assert measured.steps[-1] <= measured.steps[0] + 2 * MIB


@pytest.mark.parametrize("ram", ["40%", "100%"])
def test_resident_windows_are_part_of_the_bound(ram: str, tmp_path: Path) -> None:
    measured = measure("adamw-fused", tmp_path, 256, "4MiB", 4, ram)
    check(measured)
    share = float(ram.rstrip("%")) / 100
    assert 0.9 * share * measured.state <= measured.resident <= 1.1 * share * measured.state
    assert min(measured.steps) >= measured.resident


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CODED))
def test_decoded_state_is_part_of_the_bound(case: str, tmp_path: Path) -> None:
    """Windows are as large as the slack: one that is decoded as a whole would not fit it."""
    measured = measure(case, tmp_path, 128, "16MiB", 3)
    check(measured)
    assert measured.num_windows > 4


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES.keys() - CODED - {SMALL}))
def test_every_kind_of_update(case: str, tmp_path: Path) -> None:
    measured = measure(case, tmp_path, 820, "1MiB", NUM_STEPS.get(case, FEW_STEPS))
    # so small windows and parameters take as much again to keep track of
    assert measured.state >= FACTOR * (measured.bound - measured.bookkeeping)
    check(measured)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw-fused", "adamw-for"])
def test_the_state_does_not_matter(case: str, tmp_path: Path) -> None:
    small, large = (measure(case, tmp_path, mib, "4MiB", 3) for mib in (300, 1300))
    check(large)
    assert large.state >= FACTOR * large.bound
    # windows and parameters are counted, their bytes are not
    assert large.bound - small.bound < (large.state - small.state) / 150
    assert max(large.steps) <= max(small.steps) + 16 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("window", ["64KiB", "1MiB"])
def test_many_small_parameters(window: str, tmp_path: Path) -> None:
    check(measure(SMALL, tmp_path, 10, window, 10))


@pytest.mark.slow
def test_many_windows(tmp_path: Path) -> None:
    measured = measure("adamw-fused-one-parameter", tmp_path, 800, "768KiB", 3)
    assert measured.num_windows >= 1000
    check(measured)


@pytest.mark.slow
def test_large_windows(tmp_path: Path) -> None:
    """Temporaries of a window's many tiles do not add up."""
    check(measure("adamw-for", tmp_path, 600, "64MiB", 3))
