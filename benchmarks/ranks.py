"""What do ranks that share the state move, and how long do they wait for each other?

    python benchmarks/ranks.py DIR                      # 1, 2 and 4 ranks, AdamW, 1 GiB of state
    python benchmarks/ranks.py DIR --ranks 2 --state 4GiB --optimizer muon

    of one       bytes that a rank's drive moves in a step, as a part of what one rank alone moves
    waiting      part of `step()` in which a rank only waits for others: to agree, and for values
    gathered     bytes of new values that a rank sends and takes, as a part of the parameters' bytes
    slowest      I/O time of the slowest rank over the mean, when all read and write as much as
                 in a step and do nothing else

Ranks are processes on this machine, with gloo; each figure is of the medians of all rounds.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from contest import make_params

import optstream
from optstream.units import parse_bytes

STATE_BYTES_PER_PARAM = {"adamw": 8, "muon": 4}


@dataclass(frozen=True)
class Measured:
    """Of one rank: medians of its rounds; bytes are of a step."""

    moved_bytes: float
    gathered_bytes: float
    step_s: float
    wait_s: float
    io_s: float


def make_optimizer(name: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(params, lr=1e-4, fused=True)
    return optstream.Muon(params)


def measure(streamed: optstream.StreamedOptimizer, io_s: float, rounds: int) -> Measured:
    reports = []
    streamed.step()
    streamed.step()
    for _ in range(2 * rounds):  # scans alternate, and with them what is read
        streamed.step()
        reports.append(streamed.report)
    return Measured(
        moved_bytes=statistics.fmean(r.read_bytes + r.written_bytes for r in reports),
        gathered_bytes=statistics.median(r.exchanged_bytes for r in reports),
        step_s=statistics.median(r.total_s for r in reports),
        wait_s=statistics.median(r.exchange_wait_s for r in reports),
        io_s=io_s,
    )


def measure_io(args: argparse.Namespace, params: list[torch.nn.Parameter]) -> float:
    """Return the time of moving the state of some parameters, while other ranks do so too."""
    seconds = []
    with optstream.offload(
        make_optimizer(args.optimizer, params), args.directory, window=args.window
    ) as streamed:
        streamed.step()
        streamed._state._updater.update = lambda *args: None
        for _ in range(2 * args.rounds):
            streamed._state.stream.drain()
            dist.barrier()
            start = time.perf_counter()
            streamed.step()
            streamed._state.stream.drain()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def run_rank(rank: int, size: int, meeting: str, args: argparse.Namespace, results: object) -> None:
    torch.set_num_threads(1)
    logging.getLogger("optstream").setLevel(logging.ERROR)  # of ranks that share nothing, meant so
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    params = make_params(parse_bytes(args.state) // STATE_BYTES_PER_PARAM[args.optimizer], 32)
    io_s = measure_io(args, params[rank::size])
    with optstream.offload(
        make_optimizer(args.optimizer, params),
        args.directory,
        window=args.window,
        process_group=dist.group.WORLD,
    ) as streamed:
        results[rank] = measure(streamed, io_s, args.rounds)
    dist.destroy_process_group()


def run(size: int, args: argparse.Namespace) -> list[Measured]:
    """Return what each of so many ranks measured."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(
            run_rank, (size, str(Path(folder) / "meeting"), args, results), nprocs=size
        )
        return [results[rank] for rank in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a directory on the drive to measure")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--state", default="1GiB")
    parser.add_argument("--window", default="16MiB")
    parser.add_argument("--optimizer", choices=STATE_BYTES_PER_PARAM, default="adamw")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    param_bytes = parse_bytes(args.state) * 4 // STATE_BYTES_PER_PARAM[args.optimizer]
    [alone] = run(1, args)
    print("ranks  step s  of one  waiting  gathered  slowest")
    print(f"    1  {alone.step_s:6.2f}    1.00     0.00      0.00     1.00")
    for size in args.ranks:
        found = run(size, args)
        moved = max(each.moved_bytes for each in found) / alone.moved_bytes
        waiting = max(each.wait_s / each.step_s for each in found)
        gathered = max(each.gathered_bytes for each in found) / param_bytes
        slowest = max(each.io_s for each in found) / statistics.fmean(x.io_s for x in found)
        step_s = max(each.step_s for each in found)
        ratios = f"{moved:6.3f}  {waiting:7.3f}  {gathered:8.3f}  {slowest:7.2f}"
        print(f"{size:5}  {step_s:6.2f}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
