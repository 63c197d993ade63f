"""The example for Ray runs as it stands, on a local Ray with two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.mark.slow
def test_two_workers_share_the_state(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "state"), "--steps", "20"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        },
    )
    assert done.returncode == 0, done.stderr
    said = r"rank (\d): loss ([\d.]+) to ([\d.]+), sum of weights (\S+)"
    found = set(re.findall(said, done.stdout + done.stderr))
    assert {rank for rank, *_ in found} == {"0", "1"}
    assert all(float(last) < float(first) / 5 for _, first, last, _ in found)
    assert len({weights for *_, weights in found}) == 1
    reports = set(re.findall(r"rank (\d): step 20: (\d+) windows", done.stdout + done.stderr))
    assert {rank for rank, num_windows in reports if int(num_windows) > 0} == {"0", "1"}
    assert not list(tmp_path.glob("state/*"))
