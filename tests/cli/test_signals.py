"""Ctrl-C and SIGTERM in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHORT = ("--model", "tiny", "--batch-size", 2, "--seq-len", 16)


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_child(place: Path, text: Path, *argv: object) -> subprocess.Popen[str]:
    """Start a training that would take very long."""
    command = [sys.executable, "-m", "optstream", "train", "--text", str(text), *map(str, SHORT)]
    command += ["--steps", "1000000", "--metrics", "../m.jsonl", *map(str, argv)]
    source = Path(__file__).parents[2] / "src"
    return subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(child: subprocess.Popen[str], signum: int) -> tuple[str, str]:
    """Send a signal and return standard output and error; a child that does not end is killed."""
    child.send_signal(signum)
    try:
        return child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.kill()
        raise


def wait_for_step(child: subprocess.Popen[str]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("step 1/"):
            return
    pytest.fail("the child ended before its first step")


@pytest.mark.parametrize("store", ["none", "direct"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_ends_it_after_the_step_with_the_table(place, text, store, signum):
    with start_child(place, text, "--store", store) as child:
        wait_for_step(child)
        out, err = end(child, signum)
    assert child.returncode == 128 + signum
    assert "Traceback" not in err
    assert f"stopped by {signum.name}" in out
    assert "not measured after" in out
    steps = [line["step"] for line in read_metrics(place / "../m.jsonl")]
    assert steps == list(range(len(steps)))
    assert f"{steps[-1]} of 1000000" in out
    assert list(place.iterdir()) == []


def test_a_signal_during_set_up_ends_it_at_once(place, text):
    with start_child(place, text, "--store", "none") as child:
        assert child.stderr is not None
        child.stderr.readline()  # "reading the text"
        out, err = end(child, signal.SIGINT)
    assert child.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "optstream: stopped by SIGINT"
    assert "Traceback" not in err


def test_a_second_signal_does_not_wait_for_the_step(place, text):
    metrics = place / "../m.jsonl"
    # a step of many seconds, had it to be finished
    with start_child(place, text, "--seq-len", "128", "--batch-size", "1000") as child:
        while child.poll() is None and not (metrics.exists() and read_metrics(metrics)):
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        # another one: Python takes two equal signals during one long operation for one
        out, err = end(child, signal.SIGTERM)
    assert child.returncode == 143
    assert out == ""
    assert err.splitlines()[-1] == "optstream: stopped by SIGTERM"
    assert [line["step"] for line in read_metrics(metrics)] == [0]
    assert list(place.iterdir()) == []
