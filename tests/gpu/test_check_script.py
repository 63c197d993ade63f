"""The check script without a GPU: it says so; its checks, on a CPU, find nothing and can find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpu.conftest import SCRIPT

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_skipped(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout == "skipped: torch finds no CUDA device here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_its_checks_pass_on_a_cpu(gpu_check: ModuleType, tmp_path: Path) -> None:
    outcomes = [
        *gpu_check.check_parity(CPU, tmp_path),
        *gpu_check.check_stress(CPU, tmp_path, rounds=2, max_delay_s=0.001, num_params=12),
        *gpu_check.check_memory(CPU, tmp_path, 48 * 2**20, "1MiB"),
        *gpu_check.measure_speed(CPU, tmp_path, 16 * 2**20, "1MiB"),
    ]
    assert [outcome for outcome in outcomes if outcome.ok is False] == []
    assert {outcome.check for outcome in outcomes} == {"parity", "stress", "memory", "speed"}


def test_a_wrong_bit_is_told(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed_run = gpu_check.streamed_run

    def one_bit_off(*args: object, **options: object) -> list[torch.Tensor]:
        params = streamed_run(*args, **options)
        params[0].view(-1)[0] += 1
        return list(params)

    monkeypatch.setattr(gpu_check, "streamed_run", one_bit_off)
    outcomes = list(gpu_check.check_stress(CPU, tmp_path, rounds=1, max_delay_s=0, num_params=4))
    assert [outcome.ok for outcome in outcomes] == [False]


def test_an_exception_is_a_line(gpu_check: ModuleType) -> None:
    def check() -> object:
        yield gpu_check.Outcome("parity", "x", True, "")
        raise RuntimeError("CUDA out of memory")

    outcomes = list(gpu_check.guarded(check()))
    assert [outcome.ok for outcome in outcomes] == [True, False]
    assert outcomes[1].result == "CUDA out of memory"
