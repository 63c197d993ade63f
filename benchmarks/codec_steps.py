"""A step with each codec against `exact`, and against what its bytes predict; see step.py.

    python benchmarks/step.py DIR --codec split bf16 int8
    python benchmarks/step.py DIR --codec split bf16 int8 --optimizers muon --state 64MiB \\
        --windows 2MiB --drive-bandwidth 15MB/s

Muon's own arithmetic takes longer on a CPU than most drives do: only on a slow one does its step
wait for bytes, as it does beside an accelerator. SGD keeps what Muon keeps and waits for any drive.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from contest import run_rounds

import optstream
from optstream.optimizer import StreamedOptimizer

BYTES_PER_PARAM = {"adamw": 12, "sgd": 8, "muon": 8}
"""With `exact`: masters and moments."""

COLUMNS = 1024
ROWS = {"adamw": 2048, "sgd": 2048, "muon": 256}


def compare(
    name: str, codecs: Sequence[str], directory: Path, state_bytes: int, window: str, rounds: int
) -> None:
    """Print a line for `exact` and each of the codecs; all take turns.

    Args:
        state_bytes: of `exact`.
    """
    num_params = state_bytes // BYTES_PER_PARAM[name]
    with contextlib.ExitStack() as closing:
        streamed = {
            codec: optstream.offload(
                _optimizer(name, num_params), directory, window=window, codec=codec
            )
            for codec in ("exact", *codecs)
        }
        for each in streamed.values():
            closing.enter_context(contextlib.closing(each))
        calls = {codec: lambda each=each: _step(each) for codec, each in streamed.items()}
        timed = run_rounds(calls, rounds)
    seconds = {codec: statistics.median(values) for codec, values in timed.items()}
    exact_bytes = streamed["exact"].plan.written_bytes_per_step
    for codec, each in streamed.items():
        predicted_s = seconds["exact"] * each.plan.written_bytes_per_step / exact_bytes
        print(
            f"{name:6} {codec:16} {each.plan.state_bytes / _count(each):6.2f} B a parameter, "
            f"{seconds[codec] / _count(each) * 1e9:6.1f} ns; {seconds[codec]:7.3f} s, "
            f"{seconds[codec] / predicted_s:5.2f} of what its bytes predict; "
            f"{seconds['exact'] / seconds[codec]:5.2f} times as fast as exact",
            flush=True,
        )


def _step(streamed: StreamedOptimizer) -> None:
    streamed.step()
    streamed._state.stream.drain()


def _count(streamed: StreamedOptimizer) -> int:
    return sum(param.numel() for group in streamed.param_groups for param in group["params"])


def _optimizer(name: str, num_params: int) -> torch.optim.Optimizer:
    """Return an optimizer of bfloat16 matrices, with gradients."""
    shape = (ROWS[name], COLUMNS)
    values = torch.randn(shape).mul_(0.02).bfloat16()
    params = []
    for _ in range(max(1, num_params // values.numel())):
        param = torch.nn.Parameter(values.clone())
        param.grad = torch.randn(shape).mul_(1e-3).bfloat16()
        params.append(param)
    if name == "muon":
        return optstream.Muon(params)
    if name == "sgd":
        return torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True)
    return torch.optim.AdamW(params, lr=1e-4, fused=True)
