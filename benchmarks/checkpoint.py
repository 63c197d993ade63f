"""How long does training stand still for a checkpoint? Against torch, over sizes.

    python benchmarks/checkpoint.py DIR                       # 1, 2 and 4 GiB of state
    python benchmarks/checkpoint.py DIR --state 1GiB --rounds 5

Ratios are of medians over rounds of one run in which the contestants take turns: drives and
machines are shared and their speed drifts. The same state (AdamW, fused) is held twice: streamed,
and in memory by the plain optimizer.

Each save follows a step at once, whose last writes are then still under way.

    blocks               the time for which `save(wait=False)` blocks training: against torch.save
                         of the plain optimizer's state_dict from memory, made durable by fsync; and
                         against the time for which torch.distributed.checkpoint.async_save of it
                         blocks
    save                 all of `save()`, which returns when the checkpoint is durable: what is left
                         of the step's writes included; and without them, when they are through
    step after           the first step after a save and an ordinary one, their writes included
    step beside          the first step after `save(wait=False)`, the rest of which goes on
                         meanwhile, and one behind a step that was not saved; both find the last
                         writes of that step under way
    load / torch.load    `load()` and torch.load of the file that torch.save wrote
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contest import make_params, timed

import optstream
from optstream.optimizer import StreamedOptimizer
from optstream.units import format_bytes, parse_bytes

BYTES_PER_PARAM = 8
Seconds = defaultdict[str, list[float]]


class Contest:
    """One streamed and one plain optimizer with equal state, and where they save it."""

    def __init__(self, directory: Path, state_bytes: int, window: str) -> None:
        # of the same parameters: what they become does not matter, memory does
        params = make_params(state_bytes // BYTES_PER_PARAM)
        self.directory = directory
        self.plain, inner = (torch.optim.AdamW(params, lr=1e-4, fused=True) for _ in range(2))
        self.plain.step()
        self.streamed: StreamedOptimizer = optstream.offload(
            inner, directory / "live", window=window
        )
        self.step()
        self.step()

    def step(self) -> None:
        self.streamed.step()
        self.streamed._state.stream.drain()

    def torch_save(self) -> None:
        with open(self.directory / "state.pt", "wb") as file:
            torch.save(self.plain.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def async_save(self) -> float:
        """Return the seconds for which the call blocks."""
        path = self.directory / "dcp"
        start = time.perf_counter()
        future = dcp.async_save(self.plain.state_dict(), checkpoint_id=path)
        blocked_s = time.perf_counter() - start
        future.result()  # type: ignore[union-attr]
        shutil.rmtree(path)
        return blocked_s

    def step_and_save(self, *, settled: bool = False, wait: bool = True) -> float:
        """Return the seconds for which a save to a new path blocks, behind a step."""
        checkpoint = self.directory / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        self.step() if settled else self.streamed.step()
        return timed(lambda: self.streamed.save(checkpoint, wait=wait))

    def round(self, seconds: Seconds) -> None:
        """Let everybody have a turn; what a turn leaves behind is gone before the next."""
        seconds["torch.save"].append(timed(self.torch_save))
        seconds["step"].append(timed(self.step))
        seconds["save"].append(self.step_and_save())
        seconds["step after"].append(timed(self.step))
        seconds["settled save"].append(self.step_and_save(settled=True))
        self.step()
        seconds["step"].append(timed(self.step))
        seconds["blocks"].append(self.step_and_save(wait=False))
        seconds["step beside"].append(timed(self.step))
        self.streamed._saver.background.wait()
        self.streamed.step()
        seconds["step behind"].append(timed(self.step))
        seconds["step"].append(timed(self.step))
        seconds["async_save"].append(self.async_save())
        seconds["torch.load"].append(timed(lambda: torch.load(self.directory / "state.pt")))
        seconds["load"].append(timed(lambda: self.streamed.load(self.directory / "checkpoint")))
        self.step()
        shutil.rmtree(self.directory / "checkpoint")
        self.step()


def measure(directory: Path, state: str, window: str, rounds: int) -> None:
    contest = Contest(directory, parse_bytes(state), window)
    seconds: Seconds = defaultdict(list)
    contest.round(defaultdict(list))
    for _ in range(rounds):
        contest.round(seconds)
    contest.streamed.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    columns = [
        f"{median['blocks']:.3f} s",
        f"{median['blocks'] / median['torch.save']:.4f}",
        f"{median['blocks'] / median['async_save']:.3f}",
        f"{median['save']:.3f} s",
        f"{median['save'] / median['torch.save']:.3f}",
        f"{median['settled save'] / median['torch.save']:.3f}",
        f"{median['step after'] / median['step']:.2f}",
        f"{median['step beside'] / median['step behind']:.2f}",
        f"{median['load'] / median['torch.load']:.3f}",
    ]
    print(" | ".join([f"| {format_bytes(parse_bytes(state))}", *columns]), "|", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--state", nargs="+", default=["1GiB", "2GiB", "4GiB"])
    parser.add_argument("--window", default="128MiB")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(args.directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(
        "| state | blocks | / torch.save | / async_save | save | / torch.save "
        "| settled / torch.save | step after | step beside | load / torch.load |"
    )
    try:
        for state in args.state:
            measure(args.directory, state, args.window, args.rounds)
    finally:
        dist.destroy_process_group()
        for name in ("state.pt", "store"):
            (args.directory / name).unlink(missing_ok=True)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
