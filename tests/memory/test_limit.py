"""The experiment of the field: the same training under a memory limit, in memory and streamed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optstream.mounts import find_mount

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory_limit.py"
STATE = "256MiB"
MIB = 2**20


def need_drive(directory: Path) -> None:
    mount = find_mount(directory)
    if mount is None or mount.kind in {"tmpfs", "ramfs"}:
        pytest.skip("the temporary directory is in memory; give pytest --basetemp on a drive")


def survival(directory: Path, limit_by: str) -> dict[str, dict[str, Any]]:
    """Return how each training ended: "unlimited", "plain", "direct", "mapped"."""
    need_drive(directory)
    arguments = ["--only", "survival", "--state", STATE, "--window", "2MiB", "--threads", "1"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), *arguments, "--limit-by", limit_by, "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout.removeprefix("skipped: ").strip())
    unlimited, *limited = json.loads(result.stdout)
    assert list(directory.iterdir()) == []
    return {"unlimited": unlimited} | {outcome["kind"]: outcome for outcome in limited}


def test_the_scan_that_never_goes_backwards_reads_ahead(tmp_path: Path) -> None:
    need_drive(tmp_path)
    spec = importlib.util.spec_from_file_location("limited", SCRIPT.with_name("limited.py"))
    assert spec is not None
    assert spec.loader is not None
    limited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(limited)
    options: dict[str, Any] = {"kind": "forward", "directory": str(tmp_path), "window": "1MiB"}
    options |= {"num_layers": 1, "width": 1024, "train": False, "threads": torch.get_num_threads()}
    training = limited.Training(options)
    for _ in range(2):
        training.step()
        assert 2 in training.optimizer._state.stream._mover._coming
        assert training.optimizer._state.progress.backwards is False
    training.optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit_by", ["cgroup", "rlimit"])
def test_only_streamed_training_survives(limit_by: str, tmp_path: Path) -> None:
    ended = survival(tmp_path, limit_by)
    assert ended["unlimited"]["ended"] == "finished"
    # its state of 256 MiB; what it took before varies
    assert ended["unlimited"]["anon_bytes"] > 240 * MIB
    if limit_by == "cgroup":
        assert ended["plain"]["ended"] == "killed by the kernel"
    else:
        assert "memory" in ended["plain"]["ended"]
    for kind in ("direct", "mapped"):
        outcome = ended[kind]
        assert outcome["ended"] == "finished", kind
        assert outcome["losses"] == ended["unlimited"]["losses"], kind
        assert outcome["anon_bytes"] <= outcome["bound_bytes"] < 128 * MIB, kind
    if limit_by == "cgroup":
        # what is kept of 256 MiB that were written and read four times
        assert ended["direct"]["cache_bytes"] < 8 * MIB
        assert ended["mapped"]["cache_bytes"] > 64 * MIB
