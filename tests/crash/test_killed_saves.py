"""A save killed at every call: a new process finds the older or the new checkpoint, whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import optstream
from checkpoint.runs import assert_same_bits, go_on, set_weights, streamed, weights
from optstream import OffloadError
from parity.cases import make_params

SHAPES = ((90, 130), (7,))
STATE = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("older", "exchange", "before"),
    [
        pytest.param(True, True, True, id="over-an-older-one"),
        pytest.param(False, True, False, id="first", marks=pytest.mark.slow),
        pytest.param(True, False, False, id="without-exchange", marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_call(older: bool, exchange: bool, before: bool, tmp_path: Path) -> None:
    flags = [str(int(flag)) for flag in (older, exchange, before)]
    run = subprocess.run(
        [sys.executable, "-m", "crash.child", str(tmp_path), *flags],
        env={**os.environ, **STATE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    num_calls = int(run.stdout)
    assert num_calls > 15
    reference = [after(steps) for steps in (3, 4)]
    found = [inspect(tmp_path / f"{at:04d}", older, reference) for at in range(num_calls + 1)]
    # the older one (or none) up to one moment, the new one from there on
    kinds = [kind for kind, _ in found]
    assert kinds == sorted(kinds)
    assert kinds[0] == 0
    assert kinds[-1] == 1
    # what a killed save leaves beside a checkpoint is something in most places
    assert any(leftover for _, leftover in found)


def after(steps: int) -> list[torch.Tensor]:
    params = make_params(SHAPES)
    optimizer = torch.optim.AdamW(params, lr=0.01, foreach=False)
    go_on(params, optimizer, range(steps))
    return weights(params)


def inspect(place: Path, older: bool, reference: list[list[torch.Tensor]]) -> tuple[int, bool]:
    """Check what a killed save left, save again; return (new one there, leftovers there)."""
    target = place / "checkpoint"
    live = place / "live"
    # nameless: nothing outlives the process; one that ended by itself removes the directory too
    assert not live.exists() or not any(live.iterdir())
    leftover = any(path.suffix for path in place.glob("checkpoint.*"))
    params, optimizer = streamed(live, shapes=SHAPES, seed=1)
    with optimizer:
        if not older and not target.exists():
            kind = 0
            with pytest.raises(OffloadError, match="is no checkpoint"):
                optimizer.load(target)
            go_on(params, optimizer, [0])
        else:
            optimizer.load(target, check=True)
            steps = optimizer._reporter.next_step - 1
            kind = steps - 2
            set_weights(params, torch.load(place / ("newer.pt" if kind else "older.pt")))
            go_on(params, optimizer, [steps])
            assert_same_bits(weights(params), reference[kind])
        optimizer.save(target)
    optstream.verify(target)
    names = {path.name for path in place.iterdir() if path.suffix != ".pt"}
    assert names - {"live"} == {"checkpoint"}
    return kind, leftover
