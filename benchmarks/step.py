"""How fast is a step? Against the drive alone, no overlap, memory; over sizes; with Muon.

    python benchmarks/step.py DIR                  # all parts; AdamW (fused), SGD, 4 GiB of state
    python benchmarks/step.py DIR --only drive --windows 64MiB 256MiB --threads 1 2 4 8
    python benchmarks/step.py DIR --only memory       # store="memory" against the plain optimizer
    python benchmarks/step.py DIR --only linear       # 1, 2, 4, 8 times the state
    python benchmarks/step.py DIR --only small        # 20000 parameters of 64 elements, and plain
    python benchmarks/step.py DIR --only muon         # Muon streamed against Muon in memory
    python benchmarks/step.py DIR --codec split bf16 int8   # against exact, bfloat16 parameters
    python benchmarks/step.py DIR --drive-bandwidth 100MB/s ...   # as on a slower drive

Ratios are of medians over rounds of one run in which the contestants take turns (A B C A B C ...):
drives and machines are shared and their speed drifts.

    step      `step()` as users call it, and the drain of its last writes
    drive     the same windows read and written by the same threads, no update at all
    serial    the same windows one after another, by the same threads: nothing overlapped
    plain     a plain loop: one thread reads, updates and writes each window
    buffered  the same with ordinary file calls: readinto, update, write, fdatasync, and the page
              cache dropped so that memory stays bounded; on files of its own, of the same size
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from buffered import BufferedFiles
from codec_steps import compare
from contest import make_params, run_rounds
from slow_drive import slow_drive

import optstream
from optstream.optimizer import StreamedOptimizer
from optstream.store.base import PIECE_BYTES
from optstream.stream.slots import allocate
from optstream.streamed.params import bind, gradient_source
from optstream.training.config import CODECS
from optstream.units import format_bytes, parse_bytes

Transfer = Callable[[int, int], None]
"""Moves a window (its index, its bytes) between its file and the slot."""

STATE_BYTES_PER_PARAM = {"adamw": 8, "sgd": 4}


def make_optimizer(name: str, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(params, lr=1e-4, fused=True)
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True)


class Contest:
    """One streamed optimizer, stepped in three ways."""

    def __init__(self, streamed: StreamedOptimizer, io_threads: int) -> None:
        self.streamed = streamed
        self.pools = {threads: ThreadPoolExecutor(threads) for threads in {1, io_threads}}
        self.slot = allocate(streamed.plan.slot_bytes)

    def step(self) -> None:
        self.streamed.step()
        self.streamed._state.stream.drain()

    def drive(self) -> None:
        updater = self.streamed._state._updater
        updater.update = lambda *args: None
        try:
            self.step()
        finally:
            del updater.update  # to be its class's own again

    def loop(self, threads: int) -> None:
        """Read, update and write one window after another."""
        store = self.streamed._state.store
        self._loop(
            lambda index, size: self._move(threads, store.read, index, size),
            lambda index, size: self._move(threads, store.write, index, size),
        )

    def buffered(self, files: BufferedFiles) -> None:
        """Do the same with other files."""
        self._loop(
            lambda index, size: files.read(index, self.slot.memory[:size]),
            lambda index, size: files.write(index, self.slot.memory[:size]),
        )

    def _loop(self, read: Transfer, write: Transfer) -> None:
        state, plan = self.streamed._state, self.streamed.plan
        groups = self.streamed.param_groups
        bound = bind(plan.params, groups, gradient_source(self.streamed._optimizer))
        with torch.no_grad():
            for index, window in enumerate(plan.windows):
                read(index, window.data_bytes)
                data = self.slot.tensor[: window.data_bytes]
                state._updater.update(plan, window, data, bound)
                write(index, window.data_bytes)
        state._updater.commit(groups)

    def _move(
        self, threads: int, transfer: Callable[..., None], window: int, num_bytes: int
    ) -> None:
        offsets = range(0, num_bytes, PIECE_BYTES)
        ends = [min(offset + PIECE_BYTES, num_bytes) for offset in offsets]
        pieces = [self.slot.memory[a:b] for a, b in zip(offsets, ends, strict=True)]
        list(self.pools[threads].map(transfer, [window] * len(ends), offsets, pieces))


def against_drive(args: argparse.Namespace, name: str, window: str, threads: int) -> None:
    params = make_params(parse_bytes(args.state) // STATE_BYTES_PER_PARAM[name])
    with contextlib.ExitStack() as closing:
        streamed = closing.enter_context(
            optstream.offload(
                make_optimizer(name, params), args.directory, window=window, io_threads=threads
            )
        )
        streamed.step()
        contest = Contest(streamed, threads)
        sizes = [window.data_bytes for window in streamed.plan.windows]
        files = closing.enter_context(contextlib.closing(BufferedFiles(args.directory, sizes)))
        seconds = run_rounds(
            {
                "step": contest.step,
                "drive": contest.drive,
                "serial": lambda: contest.loop(threads),
                "plain": lambda: contest.loop(1),
                "buffered": lambda: contest.buffered(files),
            },
            args.rounds,
        )
        median = {key: statistics.median(values) for key, values in seconds.items()}
        moved = streamed.plan.read_bytes_per_step + streamed.plan.written_bytes_per_step
        print(
            f"{name:6} {window:>7} {threads:7} {streamed.plan.num_windows:8} "
            f"{median['step']:7.2f} {moved / median['step'] / 1e9:6.2f} "
            f"{median['drive'] / median['step']:11.2f} {median['serial'] / median['step']:12.2f} "
            f"{median['plain'] / median['step']:11.2f} "
            f"{median['buffered'] / median['step']:17.2f}",
            flush=True,
        )
    gc.collect()  # parameters of 4 GiB in a cycle would still be there beside the next ones


def against_memory(args: argparse.Namespace) -> None:
    """Time store="memory" against the plain optimizer's own step."""
    num_params = 100 * 2**20
    plain = make_optimizer("adamw", make_params(num_params))
    streamed = optstream.offload(
        make_optimizer("adamw", make_params(num_params)), args.directory, store="memory"
    )
    seconds = run_rounds({"memory": streamed.step, "plain": plain.step}, max(args.rounds, 15))
    median = {key: statistics.median(values) for key, values in seconds.items()}
    print(
        f'store="memory" / plain AdamW (fused), {num_params} parameters: '
        f"{median['memory'] / median['plain']:.3f} ({median['plain']:.3f} s)"
    )


def linear(args: argparse.Namespace) -> None:
    """Time the step for 1, 2, 4 and 8 times the state."""
    base = parse_bytes(args.state) // 8
    contests = {}
    for times in (1, 2, 4, 8):
        params = make_params(base * times // STATE_BYTES_PER_PARAM["adamw"])
        streamed = optstream.offload(
            make_optimizer("adamw", params), args.directory, window="32MiB"
        )
        streamed.step()
        contests[f"{times}"] = Contest(streamed, 4)
    seconds = run_rounds({key: contest.step for key, contest in contests.items()}, args.rounds)
    first = statistics.median(seconds["1"])
    for key, values in seconds.items():
        print(
            f"{format_bytes(base * int(key)):>10} of state: {statistics.median(values):6.2f} s, "
            f"{statistics.median(values) / first:5.2f} times the first"
        )


def small(args: argparse.Namespace) -> None:
    """Time what each parameter costs besides its bytes, against the plain optimizer's own step."""

    def make() -> torch.optim.Optimizer:
        params = [torch.nn.Parameter(torch.full((64,), 0.5)) for _ in range(20000)]
        for param in params:
            param.grad = torch.randn(64)
        return make_optimizer("adamw", params)

    plain = make()
    with contextlib.closing(optstream.offload(make(), args.directory, window="1MiB")) as streamed:
        streamed.step()
        contestants = {"small": streamed.step, "plain": plain.step}
        seconds = run_rounds(contestants, max(args.rounds, 15))
    median = {key: statistics.median(values) for key, values in seconds.items()}
    print(
        f"20000 parameters of 64 elements: streamed / plain AdamW (fused) "
        f"{median['small'] / median['plain']:.2f} ({median['plain']:.3f} s)"
    )


def muon(args: argparse.Namespace) -> None:
    """Time a streamed Muon step against the same step in memory; the update is the longer part."""
    num_matrices = max(4, parse_bytes(args.state) // 8 // (4 * 2**20))

    def make() -> torch.optim.Optimizer:
        params = []
        for _ in range(num_matrices):
            param = torch.nn.Parameter(torch.full((1024, 1024), 0.5))
            param.grad = torch.randn(1024, 1024)
            params.append(param)
        return optstream.Muon(params)

    plain = make()
    with contextlib.closing(optstream.offload(make(), args.directory, window="64MiB")) as streamed:
        contest = Contest(streamed, 4)
        streamed.step()
        contestants = {"muon": contest.step, "plain": plain.step, "drive": contest.drive}
        seconds = run_rounds(contestants, args.rounds)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    print(
        f"Muon, {num_matrices} matrices of 1024x1024, {format_bytes(num_matrices * 4 * 2**20)} of "
        f"momentum: streamed / in memory {median['muon'] / median['plain']:.3f} "
        f"({median['plain']:.2f} s in memory, the drive alone {median['drive']:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a directory on the drive to measure")
    parser.add_argument("--state", default="4GiB")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "sgd"])
    parser.add_argument("--drive-bandwidth", help="hold the drive to it, each way: 100MB/s")
    parser.add_argument("--windows", nargs="+", default=["64MiB", "128MiB", "256MiB"])
    parser.add_argument("--threads", nargs="+", type=int, default=[4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", nargs="+", choices=CODECS, help="only these, against exact")
    parser.add_argument("--only", choices=["drive", "memory", "linear", "small", "muon"])
    args = parser.parse_args()
    with contextlib.ExitStack() as held:
        if args.drive_bandwidth:
            bytes_per_s = parse_bytes(args.drive_bandwidth.removesuffix("/s"))
            held.enter_context(slow_drive(Path(args.directory), bytes_per_s))
            print(f"the kernel lets {format_bytes(bytes_per_s)}/s through, each way", flush=True)
        run(args)


def run(args: argparse.Namespace) -> None:
    if args.codec:
        state_bytes, window = parse_bytes(args.state), args.windows[0]
        for name in args.optimizers:
            compare(name, args.codec, Path(args.directory), state_bytes, window, args.rounds)
        return
    if args.only in (None, "drive"):
        print(
            "rule    window threads  windows  step s   GB/s  step/drive  step/serial  step/plain  "
            "against buffered"
        )
        for name in args.optimizers:
            for window in args.windows:
                for threads in args.threads:
                    against_drive(args, name, window, threads)
    if args.only in (None, "memory"):
        against_memory(args)
    if args.only in (None, "linear"):
        linear(args)
    if args.only in (None, "small"):
        small(args)
    if args.only in (None, "muon"):
        muon(args)


if __name__ == "__main__":
    main()
