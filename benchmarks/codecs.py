"""What do codecs cost in learning, and what do they save in bytes?

    python benchmarks/codecs.py DIR          # `small`, 50 steps of 8 x 128 tokens, 3 seeds, 24 runs
    python benchmarks/codecs.py DIR --model tiny --steps 10 --optimizers adamw --codecs exact int8

Other flags go to `optstream train`.

Trains with each codec from the same seeds and reports the held-out loss against the first codec.
The spread is the standard deviation of the first over the seeds: a difference within it is no
difference. `split` is left out unless asked for: its bits are those of `exact` (tests/parity).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from optstream.training.config import CODECS

DEFAULT_CODECS = [codec for codec in CODECS if codec != "split"]


@dataclass(frozen=True)
class Outcome:
    """Of one run: loss in nats, bytes each way of the last step, seconds of a step's update."""

    loss: float
    written_bytes: int
    optimizer_s: float


def train(args: argparse.Namespace, optimizer: str, codec: str, seed: int) -> Outcome:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-m", "optstream", "train", "--quiet"]
        command += ["--model", args.model, "--steps", args.steps, "--dtype", "bfloat16"]
        command += ["--batch-size", args.batch_size]
        command += ["--optimizer", optimizer, "--codec", codec, "--seed", seed]
        command += ["--state-dir", args.directory, "--window", args.window]
        command += ["--metrics", file.name, *args.more]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    return Outcome(
        losses[-1],
        max(line["written_bytes"] for line in steps),
        statistics.median(line["optimizer_s"] for line in steps),
    )


def compare(args: argparse.Namespace, optimizer: str) -> None:
    exact: list[float] = []
    for codec in args.codecs:
        runs = [train(args, optimizer, codec, seed) for seed in range(args.seeds)]
        losses = [run.loss for run in runs]
        if not exact:
            exact = losses
            spread = statistics.stdev(exact) if len(exact) > 1 else float("nan")
            print(f"{optimizer}: {codec} {statistics.mean(exact):.4f}, spread {spread:.4f}")
        differences = [loss - wanted for loss, wanted in zip(losses, exact, strict=True)]
        print(
            f"  {codec:16} {statistics.mean(losses):8.4f} "
            f"{statistics.mean(differences):+8.4f} on the mean, each "
            f"{' '.join(f'{difference:+.4f}' for difference in differences)}; "
            f"{runs[0].written_bytes / 2**20:6.1f} MiB written a step, "
            f"{statistics.median(run.optimizer_s for run in runs):.3f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a directory on a drive")
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--window", default="2MiB")
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=DEFAULT_CODECS)
    args, args.more = parser.parse_known_args()
    for optimizer in args.optimizers:
        compare(args, optimizer)


if __name__ == "__main__":
    main()
