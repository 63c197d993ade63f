"""Is streaming right and fast on this machine's GPU? One run of a few minutes, no arguments needed.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --directory /mnt/nvme0 --state 16GiB --json check.json

    parity    bits after ten steps, streamed against the plain optimizer, both on the GPU
    stress    many small windows, delays in the drive's and in the GPU's work: a missing wait shows
    memory    peaks of device and host memory against what the plan promises
    speed     a step against the same bytes without an update, and against state on the GPU

Exit code: 0 if all that can be wrong is right, or there is no GPU; 1 otherwise. Speed is told, not
judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream
from optstream.memory import read_memory
from optstream.stream import lane
from optstream.units import format_bytes, parse_bytes

NUM_STEPS = 10
PLACES: tuple[dict[str, Any], ...] = (
    {"store": "direct", "window": "64KiB"},
    {"store": "direct", "window": "64KiB", "ram": "40%"},
    {"store": "direct", "window": "64MiB"},
    {"store": "memory", "window": "200KiB"},
)
SHAPES = ((300, 170), (7,), (2, 4099), (7,), (512, 512), ())
MATRICES = ((300, 170), (512, 64), (64, 64), (64, 512))
STRESS_DELAY_S = 0.003
STRESS_CYCLES = 2_000_000
"""Of the GPU's clock, about a millisecond; the longest delay before an update."""
SPEED_STEPS = 4
HOST_SLACK_BYTES = 64 * 2**20
"""What CUDA itself takes on the host at its first copies and events."""


@dataclass(frozen=True)
class Case:
    """An optimizer that is checked.

    Attributes:
        make: returns the plain optimizer.
        shapes: of its parameters.
    """

    name: str
    make: Callable[[Sequence[nn.Parameter]], Optimizer]
    shapes: tuple[tuple[int, ...], ...] = SHAPES


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    check: str
    what: str
    ok: bool | None
    """None: a number to know, which nothing judges."""
    result: str


def cases(device: torch.device) -> list[Case]:
    found = [
        Case("AdamW", lambda p: torch.optim.AdamW(p, lr=0.01)),
        Case("AdamW for", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False)),
        Case("AdamW foreach", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
        Case("AdamW fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
        Case("SGD", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        Case("Adafactor", lambda p: torch.optim.Adafactor(p), MATRICES),
        Case("optstream.Muon", lambda p: optstream.Muon(p), MATRICES),
    ]
    if device.type == "cuda":
        found.append(
            Case("AdamW capturable", lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True))
        )
    if hasattr(torch.optim, "Muon"):
        found.append(Case("torch.optim.Muon", lambda p: torch.optim.Muon(p), MATRICES))
    return found


def make_params(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(value.to(device=device, dtype=dtype)) for value in values]


def set_grads(params: Sequence[Tensor], step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad.to(device=param.device, dtype=param.dtype)


def plain_run(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the parameters after the textbook loop with float32 masters."""
    params = make_params(case.shapes, device, dtype)
    masters = [nn.Parameter(p.detach().float()) if dtype != torch.float32 else p for p in params]
    optimizer = case.make(masters)
    for step in range(NUM_STEPS):
        set_grads(params, step)
        for param, master in zip(params, masters, strict=True):
            if master is not param:
                assert param.grad is not None
                master.grad = param.grad.float()
        optimizer.step()
    return [master.detach().to(dtype) for master in masters]


def streamed_run(
    case: Case, device: torch.device, dtype: torch.dtype, directory: Path, **options: Any
) -> list[Tensor]:
    params = make_params(case.shapes, device, dtype)
    with optstream.offload(case.make(params), directory, **options) as optimizer:
        for step in range(NUM_STEPS):
            set_grads(params, step)
            optimizer.step()
    return [param.detach() for param in params]


def num_different(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Return how many elements differ; NaN differs from everything."""
    return sum(int((left != right).sum()) for left, right in zip(actual, expected, strict=True))


# -- the checks


def check_parity(device: torch.device, directory: Path) -> Iterator[Outcome]:
    """Compare bits for each optimizer, float32 and bfloat16, stores and windows."""
    for case in cases(device):
        for dtype in (torch.float32, torch.bfloat16):
            yield from guarded(parity_of(case, device, dtype, directory))


def parity_of(
    case: Case, device: torch.device, dtype: torch.dtype, directory: Path
) -> Iterator[Outcome]:
    name = f"{case.name} {str(dtype).removeprefix('torch.')}"
    expected = plain_run(case, device, dtype)
    for place in PLACES:
        actual = streamed_run(case, device, dtype, directory, **place)
        different = num_different(actual, expected)
        what = " ".join([name, *place.values()])
        yield Outcome("parity", what, different == 0, f"{different} elements differ")


def check_stress(
    device: torch.device,
    directory: Path,
    rounds: int = 4,
    max_delay_s: float = STRESS_DELAY_S,
    num_params: int = 40,
) -> Iterator[Outcome]:
    """Delay reads, writes and updates at random, also on a stream that is not the default one.

    Every other pair of rounds has resident windows: only the next step waits for their copies.
    """
    for seed in range(rounds):
        draw = random.Random(seed)

        class Late(torch.optim.AdamW):
            def is_elementwise(self, group: dict[str, Any]) -> bool:
                return True

            def step(self, closure: Any = None, draw: random.Random = draw) -> Any:
                if self.param_groups[0]["params"][0].device.type == "cuda":
                    torch.cuda._sleep(draw.randrange(STRESS_CYCLES))
                return super().step(closure)

        shapes = tuple((draw.randrange(1, 200), 64) for _ in range(num_params))
        case = Case("late", lambda p: Late(p, lr=0.01), shapes)
        expected = plain_run(case, device, torch.bfloat16)
        with late_drive(draw, max_delay_s), side_stream(device, seed % 2 == 1):
            ram = "40%" if seed // 2 % 2 else 0
            options = {"window": "64KiB", "ram": ram}
            actual = streamed_run(case, device, torch.bfloat16, directory, **options)
        different = num_different(actual, expected)
        stream = "side" if seed % 2 else "default"
        yield Outcome(
            "stress", f"seed {seed}, {stream} stream", different == 0, f"{different} differ"
        )


@contextlib.contextmanager
def late_drive(draw: random.Random, max_delay_s: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("preadv", "pwritev"):
            real = getattr(os, name)

            def late(*transfer: Any, real: Any = real) -> Any:
                time.sleep(draw.uniform(0, max_delay_s))
                return real(*transfer)

            stack.enter_context(mock.patch.object(os, name, late))
        yield


@contextlib.contextmanager
def side_stream(device: torch.device, wanted: bool) -> Iterator[None]:
    if not wanted or device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def check_memory(
    device: torch.device, directory: Path, state_bytes: int = 2**30, window: str = "16MiB"
) -> Iterator[Outcome]:
    """Compare peaks of a bfloat16 run with the plan; the state is far larger than both."""
    implementations: tuple[dict[str, bool], ...] = ({"fused": True}, {"foreach": True})
    for implementation in implementations:
        params = large_params(state_bytes // 12, device, torch.bfloat16)
        inner = torch.optim.AdamW(params, **implementation)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = peaks(device)
        with optstream.offload(inner, directory, window=window) as optimizer:
            host_bytes = peaks(device)[1]
            for _ in range(3):
                optimizer.step()
                host_bytes = max(host_bytes, peaks(device)[1])
            plan = optimizer.plan
        used = peaks(device)[0] - before[0], host_bytes - before[1]
        name = next(iter(implementation))
        for place, bytes_used, bound in (
            ("device", used[0], plan.peak_device_bytes),
            ("host", used[1], plan.peak_host_bytes + HOST_SLACK_BYTES),
        ):
            yield Outcome(
                "memory",
                f"{place}, {name}, state {format_bytes(plan.state_bytes)}",
                bytes_used <= bound,
                f"{format_bytes(bytes_used)} of {format_bytes(bound)}",
            )


def peaks(device: torch.device) -> tuple[int, int]:
    """Return the most device memory since it was reset, and anonymous host memory now, in bytes."""
    if device.type != "cuda":
        return 0, read_memory().anon_bytes
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), read_memory().anon_bytes


def large_params(numel: int, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    count = max(1, numel // 2**24)
    params = [
        nn.Parameter(torch.full((numel // count,), 0.5, device=device, dtype=dtype))
        for _ in range(count)
    ]
    for param in params:
        param.grad = torch.full_like(param, 0.001)
    return params


class MaybeIdle(torch.optim.AdamW):
    """AdamW that can be told to update nothing, so that only transfers are left."""

    idle = False

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        return True

    def step(self, closure: Any = None) -> Any:
        return None if self.idle else super().step(closure)


def measure_speed(
    device: torch.device, directory: Path, state_bytes: int, window: str = "256MiB"
) -> Iterator[Outcome]:
    """Time steady steps: streamed with pinned and pageable slots, transfers alone, on the GPU."""
    params = large_params(state_bytes // 8, device, torch.float32)
    for pinned in (True, False):
        inner = MaybeIdle(params, lr=1e-4, fused=True)
        with contextlib.ExitStack() as stack:
            if not pinned:
                not_pinning = mock.patch.object(lane.CudaLane, "pin", return_value=lane.nothing)
                stack.enter_context(not_pinning)
            optimizer = stack.enter_context(optstream.offload(inner, directory, window=window))
            step_s = seconds_a_step(optimizer, device)
            inner.idle = True
            idle_s = seconds_a_step(optimizer, device)
            plan = optimizer.plan
        moved = plan.read_bytes_per_step + plan.written_bytes_per_step
        kind = "pinned" if pinned else "pageable"
        for what, seconds in ((f"step, {kind}", step_s), (f"transfers alone, {kind}", idle_s)):
            rate = f"{seconds:.3f} s, {moved / seconds / 1e9:.2f} GB/s"
            yield Outcome("speed", what, None, rate)
        yield Outcome("speed", f"step / transfers, {kind}", None, f"{idle_s / step_s:.2f}")
    if state_bytes < free_device_bytes(device):
        plain_s = seconds_a_step(torch.optim.AdamW(params, lr=1e-4, fused=True), device)
        yield Outcome("speed", "step, state on the GPU", None, f"{plain_s:.3f} s")


def seconds_a_step(optimizer: Optimizer, device: torch.device) -> float:
    optimizer.step()
    optimizer.step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(SPEED_STEPS):
        optimizer.step()
    synchronize(device)
    return (time.perf_counter() - start) / SPEED_STEPS


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_device_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**62
    return int(torch.cuda.mem_get_info(device)[0] * 0.8)


# -- the program


def run(device: torch.device, directory: Path, state_bytes: int) -> list[Outcome]:
    """Run all checks, printing each line as soon as it is known."""
    outcomes = []
    checks: tuple[Iterator[Outcome], ...] = (
        check_parity(device, directory),
        check_stress(device, directory),
        check_memory(device, directory, min(state_bytes, 2**31)),
        measure_speed(device, directory, state_bytes),
    )
    for check in checks:
        for outcome in guarded(check):
            mark = {True: "ok", False: "WRONG", None: ""}[outcome.ok]
            line = f"{outcome.check:7} {outcome.what:45} {outcome.result:32} {mark}"
            print(line.rstrip(), flush=True)
            outcomes.append(outcome)
    return outcomes


def guarded(check: Iterator[Outcome]) -> Iterator[Outcome]:
    """Make an exception a line of the table, so that the other checks still run."""
    try:
        yield from check
    except Exception as error:
        name = getattr(check, "__name__", "check")
        yield Outcome(name, type(error).__name__, False, str(error))


def default_state_bytes(directory: Path, device: torch.device) -> int:
    """Return what fits: a quarter of the free space and of the GPU, 4 GiB at most."""
    free_bytes = shutil.disk_usage(directory).free
    return min(free_bytes // 4, free_device_bytes(device) // 4, 4 * 2**30)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", help="on the drive to use; default: the working directory")
    parser.add_argument("--state", help="bytes for the speed check, such as 16GiB")
    parser.add_argument("--json", default="gpu_check.json", help="file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device here")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=args.directory or ".") as name:
        directory = Path(name)
        state_bytes = (
            parse_bytes(args.state) if args.state else default_state_bytes(directory, device)
        )
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {directory}")
        outcomes = run(device, directory, state_bytes)
    wrong = sum(outcome.ok is False for outcome in outcomes)
    result = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "state_bytes": state_bytes,
        "seconds": time.perf_counter() - start,
        "wrong": wrong,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{wrong} wrong of {len(outcomes)} lines, {result['seconds']:.0f} s; also in {args.json}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
