"""However much of the state stays in memory, the bits are those of the plain optimizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import optstream
from parity.cases import (
    NUM_STEPS,
    Case,
    assert_same_bits,
    check_case,
    make_params,
    reference,
    set_grads,
    torch_cases,
    train,
)
from parity.lanes import DeferredLane, WithoutUnloadWait, installed

CASES = [
    case
    for case in torch_cases()
    if case.name in ("SGD-momentum-for", "AdamW-fused", "Adagrad-initial-for", "Adafactor-for")
]
ADAMW = next(case for case in CASES if case.name == "AdamW-fused")
RAMS = pytest.mark.parametrize("ram", ["64KiB", "40%", "85%", "100%", "1GiB", "auto"])
STORES = pytest.mark.parametrize("store", ["direct", "mapped"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with installed(DeferredLane, monkeypatch) as made:
        yield made


@RAMS
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps(case: Case, dtype: torch.dtype, ram: str, tmp_path: Path) -> None:
    check_case(case, dtype, tmp_path, window="64KiB", ram=ram)


@pytest.mark.parametrize("ram", ["40%", "100%", "auto"])
@DTYPES
def test_with_the_mapped_store(dtype: torch.dtype, ram: str, tmp_path: Path) -> None:
    check_case(ADAMW, dtype, tmp_path, window="64KiB", store="mapped", ram=ram)


@pytest.mark.parametrize("ram", ["40%", "100%"])
@DTYPES
@STORES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_on_a_late_lane(
    case: Case, store: str, dtype: torch.dtype, ram: str, tmp_path: Path, deferred: list[str]
) -> None:
    check_case(case, dtype, tmp_path, window="64KiB", store=store, ram=ram)
    assert deferred == ["DeferredLane for cpu"]


@STORES
def test_a_missing_wait_is_seen(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step must wait for the bytes of a resident window."""
    with (
        installed(WithoutUnloadWait, monkeypatch),
        pytest.raises(AssertionError, match="bytes differ"),
    ):
        check_case(ADAMW, torch.float32, tmp_path, window="64KiB", store=store, ram="100%")


@DTYPES
def test_several_directories_and_missing_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    outcome = []
    for ram in (0, "40%", "100%"):
        params = make_params(ADAMW.shapes, dtype)
        directories = [tmp_path / "a", tmp_path / "b"]
        with optstream.offload(ADAMW.make(params), directories, window="64KiB", ram=ram) as opt:
            for step in range(8):
                set_grads(params, step)
                for index, param in enumerate(params):
                    if (step + index) % 3 == 0:
                        param.grad = None
                opt.step()
        outcome.append([param.detach() for param in params])
    assert_same_bits(outcome[0], outcome[1])
    assert_same_bits(outcome[0], outcome[2])


def test_what_is_on_its_way_is_waited_for(tmp_path: Path, deferred: list[str]) -> None:
    """Right behind a step: looking at the state, and a load that takes its place."""
    params, plain = make_params(ADAMW.shapes), make_params(ADAMW.shapes)
    reference = ADAMW.make(plain)
    train(plain, reference, range(3))
    with optstream.offload(ADAMW.make(params), tmp_path / "a", window="64KiB", ram="100%") as opt:
        train(params, opt, range(3))
        for key in ("exp_avg", "exp_avg_sq"):
            last, expected = opt.state[params[0]], reference.state[plain[0]]
            assert_same_bits([last[key]], [expected[key]])
            train(params, opt, [3])
            train(plain, reference, [3])
        opt.save(tmp_path / "checkpoint")
        weights = [param.detach().clone() for param in params]
        train(params, opt, [7])
        opt.load(tmp_path / "checkpoint")
        for param, value in zip(params, weights, strict=True):
            param.data.copy_(value)
        train(params, opt, [4])
        train(plain, reference, [4])
    assert_same_bits(params, plain)


@pytest.mark.parametrize("ram", ["40%", "100%"])
@DTYPES
@STORES
def test_saves_on_a_late_lane(
    store: str, dtype: torch.dtype, ram: str, tmp_path: Path, deferred: list[str]
) -> None:
    """What a save writes must have arrived; what a load replaces may still be on its way."""
    params = make_params(ADAMW.shapes, dtype)
    with optstream.offload(
        ADAMW.make(params), tmp_path / "a", window="64KiB", store=store, ram=ram
    ) as opt:
        for step in range(NUM_STEPS):
            train(params, opt, [step])
            opt.save(tmp_path / "checkpoint")
            if step % 3 == 0:
                opt.load(tmp_path / "checkpoint")
            if step % 3 == 1:
                opt.load_state_dict(opt.state_dict())
    assert_same_bits(params, reference(ADAMW, dtype))
