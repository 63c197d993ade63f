"""Newton-Schulz and Muon's step against this machine's own matrix product and torch.optim.Muon.

    python benchmarks/newton_schulz.py                 # both tables, 2 to 4 minutes
    python benchmarks/newton_schulz.py --threads 1 --no-emulation

Every figure is a median of rounds in which the compared things alternate, A B A B; a ratio is the
median of the rounds' ratios. Other load on the machine spoils it: each product waits for the
slowest thread. The second table is measured again in a child process that may use no instructions
beyond AVX2 (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS): a CPU without bf16
units, emulated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from optstream.muon import Muon, newton_schulz, newton_schulz_flops
from optstream.muon.coefficients import schedule
from optstream.muon.newton_schulz import uses_gram

SIZES = (256, 512, 1024, 2048)
SHAPES = [
    shape
    for small in SIZES
    for large in (small, 3 * small // 2, 2 * small, 4 * small)
    for shape in dict.fromkeys([(small, large), (large, small)])
    if large <= SIZES[-1]
]
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
LEAST_S = 0.03  # repeat what is shorter


def seconds(run: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def alternate(runs: list[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """Measure each in turn; return median seconds and speed over the first one's."""
    times = [max(1, round(LEAST_S / seconds(run, 1))) for run in runs]
    taken = [[seconds(run, n) for run, n in zip(runs, times, strict=True)] for _ in range(rounds)]
    return [
        (
            statistics.median(row[i] for row in taken),
            statistics.median(row[0] / row[i] for row in taken),
        )
        for i in range(len(runs))
    ]


def rate_table(rounds: int) -> bool:
    """Print the rate of Newton-Schulz for every shape; return whether all reach 0.7."""
    print("newton_schulz, 5 quintic steps, float32: its rate over the operations it does, against")
    print("a square product of the machine's best size here, in the same rounds")
    squares = {n: torch.randn(n, n) for n in SIZES[1:]}
    best = min(squares, key=lambda n: seconds(lambda: squares[n] @ squares[n], 3) / n**3)
    square, coefficients = squares[best], schedule("quintic", 5)
    print(f"{'shape':>12} {'side':>6} {'GFLOP':>7} {'ms':>8} {'GFLOP/s':>8} "
          f"{f'mm {best}':>8} {'ratio':>6}")  # fmt: skip
    good = True
    for rows, cols in SHAPES:
        x = torch.randn(1, rows, cols)
        gram = uses_gram(rows, cols, x.dtype, x.device)
        flops = newton_schulz_flops(rows, cols, coefficients, gram=gram)
        (product_s, _), (ours_s, faster) = alternate(
            [lambda: square @ square, lambda x=x: newton_schulz(x, coefficients)], rounds
        )
        rate, own = flops / ours_s / 1e9, 2 * best**3 / product_s / 1e9
        ratio = faster * flops / (2 * best**3)
        good &= ratio >= 0.7
        print(f"{f'{rows}x{cols}':>12} {'gram' if gram else 'plain':>6} {flops / 1e9:7.2f} "
              f"{ours_s * 1e3:8.2f} {rate:8.0f} {own:8.0f} {ratio:6.2f}")  # fmt: skip
    return good


def step_table(rounds: int, size: int = 1024) -> None:
    """Print one optimizer step on a square matrix, ours and torch's."""

    def optimizer(
        kind: Callable[..., torch.optim.Optimizer], **options: object
    ) -> Callable[[], None]:
        param = nn.Parameter(torch.randn(size, size))
        param.grad = torch.randn(size, size)
        return kind([param], **options).step

    names = [
        "torch.optim.Muon (bf16)",
        "optstream.Muon (default, float32)",
        "optstream.Muon (bf16)",
    ]
    taken = alternate(
        [optimizer(torch.optim.Muon), optimizer(Muon), optimizer(Muon, ns_dtype="bfloat16")], rounds
    )
    for name, (step_s, faster) in zip(names, taken, strict=True):
        print(f"  {name:<36} {step_s * 1e3:10.1f} ms {faster:8.2f} x torch's speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-emulation", action="store_true", help="skip the AVX2 child process")
    parser.add_argument("--only-steps", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only_steps:
        step_table(arguments.rounds)
        return 0
    good = rate_table(arguments.rounds)
    print(f"every shape at 0.7 or more of the machine's rate: {'yes' if good else 'NO'}\n")
    amx = torch.cpu._is_amx_tile_supported()
    print(f"one step, 1024x1024, this CPU ({'with' if amx else 'without'} AMX matrix units):")
    step_table(arguments.rounds)
    if not arguments.no_emulation:
        print("one step, 1024x1024, the same CPU held to AVX2 (emulates one without bf16 units):")
        sys.stdout.flush()
        command = [sys.executable, __file__, "--only-steps", "--rounds", "1"]
        command += ["--threads", str(arguments.threads)]
        subprocess.run(command, env={**os.environ, **AVX2_ONLY}, check=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
