"""Ctrl-C and SIGTERM in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optstream.training import run

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


@pytest.mark.parametrize(
    ("store", "signum"),
    [
        pytest.param("direct", signal.SIGINT, id="direct-SIGINT"),
        pytest.param("none", signal.SIGTERM, id="none-SIGTERM"),
        pytest.param("none", signal.SIGINT, id="none-SIGINT", marks=pytest.mark.slow),
        pytest.param("direct", signal.SIGTERM, id="direct-SIGTERM", marks=pytest.mark.slow),
    ],
)
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


def with_a_signal_in(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """Let a function of the run begin its n-th call with Ctrl-C."""
    real, calls = getattr(run, name), itertools.count(1)

    def signalled(*args: object) -> object:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(run, name, signalled)


def test_a_signal_while_the_last_loss_is_measured_leaves_the_table(command, text, monkeypatch):
    with_a_signal_in(monkeypatch, "held_out_loss", 2)
    outcome = command("train", "--text", text, *SHORT, "--steps", 2, "--store", "none")
    assert outcome.code == 130
    assert "2 of 2" in outcome.out
    assert "not measured after" in outcome.out


def test_a_signal_before_the_second_run_leaves_the_table_of_the_first(command, text, monkeypatch):
    with_a_signal_in(monkeypatch, "_prepare", 2)
    outcome = command("train", "--text", text, *SHORT, "--steps", 2, "--compare", "--quiet")
    assert outcome.code == 130
    assert "2 of 2" in outcome.out
    assert "muon" in outcome.out
    assert "adamw" not in outcome.out.splitlines()[1]
