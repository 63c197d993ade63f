"""Ten steps, save, a fresh process, load, ten steps: the bits of twenty steps."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optstream
from checkpoint.runs import go_on, set_weights, weights
from parity.cases import Case, assert_same_bits, make_params, torch_cases
from parity.test_third_party import packaged_cases

DTYPES = (torch.float32, torch.bfloat16)


MIXED = ((64, 96), (7,), (300, 80), (7,), (4, 24, 40))


def mixed_muon(params: Sequence[nn.Parameter], **options: Any) -> optstream.Muon:
    """Return Muon as models have it: matrices, a stack of experts, and AdamW for vectors."""
    groups = [
        {"params": [p for p in params if p.dim() == 2]},
        {"params": [p for p in params if p.dim() == 3], "split": ("stack",)},
        {"params": [p for p in params if p.dim() == 1], "use_muon": False, "lr": 1e-3},
    ]
    return optstream.Muon(groups, **options)


def muon_cases() -> list[Case]:
    kind: Any = mixed_muon
    return [
        Case("optstream.Muon", kind, {"ns_steps": 2}, MIXED),
        Case("optstream.Muon-one-row", kind, {}, ((1, 64), (1,))),  # Linear(64, 1)
        Case(
            "optstream.Muon-options",
            kind,
            {"ns_dtype": torch.float64, "ns_coefficients": (2.0, -1.5, 0.5), "nesterov": False},
            MIXED,
        ),
    ]


def all_cases() -> list[Case]:
    return [*torch_cases(), *packaged_cases(), *muon_cases()]


def where(directory: Path, case: Case, dtype: torch.dtype) -> Path:
    return directory / f"{case.name}-{dtype}"


def first_half(directory: Path, case: Case, dtype: torch.dtype) -> None:
    """Run in the process that ends: ten steps with a changing learning rate, then save."""
    params = make_params(case.shapes, dtype)
    target = where(directory, case, dtype)
    with optstream.offload(case.make(params), directory / "first", window="64KiB") as optimizer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(10):
            go_on(params, optimizer, [step])
            scheduler.step()
        optimizer.save(target)
    torch.save([weights(params), scheduler.state_dict()], f"{target}.pt")


def second_half(directory: Path, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    params = make_params(case.shapes, dtype, seed=1)
    target = where(directory, case, dtype)
    saved, progress = torch.load(f"{target}.pt")
    set_weights(params, saved)
    with optstream.offload(case.make(params), directory / "second", window="64KiB") as optimizer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.load(target)
        scheduler.load_state_dict(progress)
        for step in range(10, 20):
            go_on(params, optimizer, [step])
            scheduler.step()
        assert optimizer.report is not None
        assert optimizer.report.step == 20
    return weights(params)


def without_a_stop(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    params = make_params(case.shapes, dtype)
    with optstream.offload(case.make(params), ".", store="memory") as optimizer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(20):
            go_on(params, optimizer, [step])
            scheduler.step()
    return weights(params)


def saved_by_a_child(which: str, factory: pytest.TempPathFactory) -> Path:
    """Return the directory of all checkpoints, made once by a process that is gone."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / f"saved-{which}"
    with open(shared / f"{which}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            code = "from checkpoint.test_resume import main; main()"
            path = {"PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-c", code, which, str(directory)]
            subprocess.run(command, check=True, env={**os.environ, **path})
    return directory


def main() -> None:
    torch.set_num_threads(1)
    for case in {"quick": QUICK, "others": OTHERS}[sys.argv[1]]:
        for dtype in DTYPES:
            first_half(Path(sys.argv[2]), case, dtype)


ALL = all_cases()
OTHERS = [case for case in ALL if case.options.get("foreach") or case.options.get("fused")]
QUICK = [case for case in ALL if case not in OTHERS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_resume_is_invisible(
    case: Case, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = saved_by_a_child("quick", tmp_path_factory)
    assert_same_bits(second_half(saved, case, dtype), without_a_stop(case, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_resume_is_invisible_for_other_implementations(
    case: Case, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = saved_by_a_child("others", tmp_path_factory)
    assert_same_bits(second_half(saved, case, dtype), without_a_stop(case, dtype))
