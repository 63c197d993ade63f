"""Checkpoints move no bytes and take no memory; counted by the kernel in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
FEW_MIB = 24 * MIB
"""Two or three pieces of 8 MiB, and what Python allocates; far below any state here."""


@pytest.mark.parametrize(
    "state_bytes",
    [pytest.param(256 * MIB, id="256MiB"), pytest.param(4096 * MIB, marks=pytest.mark.slow)],
)
def test_bytes_and_memory(state_bytes: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "checkpoint.measured", str(tmp_path), str(state_bytes)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    costs = json.loads(run.stdout)
    manifest_bytes = (tmp_path / "checkpoint" / "manifest.json").stat().st_size
    for name, cost in costs.items():
        if name != "step after":  # that makes gradients
            one_tensor = state_bytes // 16 if name == "dcp.load" else 0  # it loads one at a time
            assert cost["anon"] < FEW_MIB + 2 * one_tensor, (name, cost)
    assert costs["save"]["write_bytes"] <= MIB + manifest_bytes, costs["save"]
    assert costs["save"]["wchar"] <= MIB + manifest_bytes, costs["save"]
    num_windows = len(list((tmp_path / "checkpoint").glob("rank*/*")))
    headers_bytes = 2 * num_windows * 4096  # held against the manifest, and against the plan
    assert costs["load"]["rchar"] <= MIB + headers_bytes + manifest_bytes, costs["load"]
    assert costs["load"]["read_bytes"] <= MIB + headers_bytes + manifest_bytes, costs["load"]
    assert costs["state_dict"]["rchar"] <= MIB, costs["state_dict"]
