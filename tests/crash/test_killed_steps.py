"""A run killed at random points of its steps: the last checkpoint is whole, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import optstream
from checkpoint.runs import after, assert_same_bits, go_on, set_weights, streamed, weights

TRAIN = """
import itertools, os, sys, torch
from pathlib import Path
from checkpoint.runs import go_on, streamed, weights
torch.set_num_threads(1)
root = Path(sys.argv[1])
params, optimizer = streamed(root / "live")
print("ready", flush=True)
for step in itertools.count():
    go_on(params, optimizer, [step])
    if step % 3 == 2:
        torch.save(weights(params), root / "next.pt")
        os.replace(root / "next.pt", root / f"{step + 1}.pt")
        optimizer.save(root / "checkpoint")
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_killed_while_it_trains_and_saves(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while not (tmp_path / "checkpoint").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.5))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not any((tmp_path / "live").iterdir())
    optstream.verify(tmp_path / "checkpoint")
    params, optimizer = streamed(tmp_path / "live", seed=1)
    with optimizer:
        optimizer.load(tmp_path / "checkpoint")
        steps = optimizer._reporter.next_step - 1
        set_weights(params, torch.load(tmp_path / f"{steps}.pt"))
        go_on(params, optimizer, range(steps, steps + 2))
        optimizer.save(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(steps + 2))
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".pt"}
    assert names == {"checkpoint", "live"}
