"""Short trainings that save, and what they measured."""

from __future__ import annotations

import json
from pathlib import Path

from optstream.cli.main import main

SHORT = ("--model", "tiny", "--steps", "4", "--batch-size", "2", "--seq-len", "16")
FAST = (*SHORT, "--eval-tokens", "64", "--quiet")


def train(metrics: Path, *argv: object) -> dict[int | str, float]:
    """Run the command; return the losses, all bits, by step, and the last one held out."""
    metrics.unlink(missing_ok=True)
    code = main(["train", *FAST, "--metrics", str(metrics), *map(str, argv)])
    assert code == 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return {**losses, "held out": lines[-1]["held_out_loss"]}


def from_step(losses: dict[int | str, float], step: int) -> dict[int | str, float]:
    """Return what a run that starts after a step measures of the whole."""
    return {key: loss for key, loss in losses.items() if not (isinstance(key, int) and key <= step)}
