"""The pipeline's waits, proven without an accelerator: a lane that copies late and leaves NaN."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from parity.cases import (
    Case,
    assert_same_bits,
    check_case,
    make_params,
    reference,
    set_grads,
    torch_cases,
    train,
)
from parity.lanes import (
    DeferredLane,
    WithoutLoadWait,
    WithoutReuseWait,
    WithoutUnloadWait,
    installed,
)

REPRESENTATIVE = [
    case
    for case in torch_cases()
    if case.name
    in (
        "SGD-momentum-for",
        "AdamW-fused",
        "AdamW-amsgrad-foreach",
        "Adagrad-initial-for",
        "RMSprop-centered-momentum-foreach",
        "Adafactor-for",
        "Muon",
    )
]
ADAMW = next(case for case in REPRESENTATIVE if case.name == "AdamW-fused")
STORES = pytest.mark.parametrize("store", ["direct", "mapped", "memory"])


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with installed(DeferredLane, monkeypatch) as made:
        yield made


@STORES
@pytest.mark.parametrize("window", ["64KiB", "16MiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_ten_steps(
    case: Case, dtype: torch.dtype, window: str, store: str, tmp_path: Path, deferred: list[str]
) -> None:
    check_case(case, dtype, tmp_path, window=window, store=store)
    assert deferred == ["DeferredLane for cpu"]


@STORES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_missing_gradients_and_parameters_that_come_later(
    dtype: torch.dtype, store: str, tmp_path: Path, deferred: list[str]
) -> None:
    def grads(params: Sequence[nn.Parameter], step: int) -> None:
        set_grads(params, step)
        for index, param in enumerate(params):
            param.requires_grad_(index != 1 or step >= 4)
            if (step + index) % 3 == 0 or not param.requires_grad:
                param.grad = None

    outcome = []
    for window in ("64KiB", "16MiB"):
        params = make_params(ADAMW.shapes, dtype)
        params[1].requires_grad_(False)
        with optstream.offload(ADAMW.make(params), tmp_path, window=window, store=store) as opt:
            for step in range(8):
                grads(params, step)
                opt.step()
        outcome.append([param.detach() for param in params])
    assert all(torch.isfinite(param).all() for param in outcome[0])
    assert_same_bits(*outcome)


@STORES
def test_state_that_was_there_already(store: str, tmp_path: Path, deferred: list[str]) -> None:
    params = make_params(ADAMW.shapes)
    inner = ADAMW.make(params)
    train(params, inner, range(3))
    with optstream.offload(inner, tmp_path, window="64KiB", store=store) as optimizer:
        train(params, optimizer, range(3, 10))
    assert_same_bits(params, reference(ADAMW, torch.float32))


@STORES
@pytest.mark.parametrize("kind", [WithoutLoadWait, WithoutUnloadWait, WithoutReuseWait])
def test_a_missing_wait_is_seen(
    kind: type[DeferredLane], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(kind, monkeypatch), pytest.raises(AssertionError, match="bytes differ"):
        check_case(ADAMW, torch.float32, tmp_path, window="64KiB", store=store)
