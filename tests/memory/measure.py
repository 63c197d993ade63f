"""Run in a process of its own: wrap an optimizer, step, print the peaks of anonymous memory.

    python measure.py CASE STATE_MIB WINDOW STEPS RAM DIRECTORY

Peaks are what the process uses above its model and gradients, in bytes, by phase. They are exact
where the kernel lets us reset VmHWM (it counts every page, mapped code too), else sampled.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import optstream

MIB = 2**20
SAMPLE_S = 0.002


@dataclass(frozen=True)
class Case:
    """An optimizer and its parameters.

    Attributes:
        make: returns the optimizer.
        shape, dtype: of each parameter.
        state_bytes: of each element.
        codec: of the state.
    """

    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    state_bytes: int
    shape: tuple[int, int] = (1024, 1024)
    dtype: torch.dtype = torch.float32
    codec: str = "exact"


def adamw_named(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW on parameters with names as long as those of large models."""
    name = "model.language_model.layers.{}.mlp.experts.gate.scale".format
    return torch.optim.AdamW([(name(i), p) for i, p in enumerate(params)], fused=True)


BF16 = torch.bfloat16
TALL = (2048, 64)
LONG = (8192, 1024)
CASES = {
    "adamw-for": Case(lambda p: torch.optim.AdamW(p, foreach=False), 8),
    "adamw-foreach": Case(lambda p: torch.optim.AdamW(p, foreach=True), 8),
    "adamw-fused": Case(lambda p: torch.optim.AdamW(p, fused=True), 8),
    "adamw-fused-one-parameter": Case(
        lambda p: torch.optim.AdamW(p, fused=True), 8, shape=(100 * 1024, 1024)
    ),
    "adamw-fused-small": Case(lambda p: adamw_named(p), 8, shape=(8, 8)),
    "sgd": Case(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    "adamw-for-bf16": Case(lambda p: torch.optim.AdamW(p, foreach=False), 12, dtype=BF16),
    "adafactor-bf16": Case(lambda p: torch.optim.Adafactor(p), 4, shape=(512, 512), dtype=BF16),
    "muon": Case(lambda p: optstream.Muon(p, ns_steps=1), 4, shape=TALL),
    "muon-bf16": Case(lambda p: optstream.Muon(p, ns_steps=1), 8, shape=TALL, dtype=BF16),
    "adamw-split": Case(lambda p: torch.optim.AdamW(p, fused=True), 10, LONG, BF16, "split"),
    "adamw-int8": Case(lambda p: torch.optim.AdamW(p, fused=True), 4, LONG, BF16, "int8"),
    "muon-int8": Case(lambda p: optstream.Muon(p, ns_steps=1), 3, TALL, BF16, "int8"),
}


class Memory:
    """Peaks of this process above `base_bytes`."""

    def __init__(self) -> None:
        self.sampled_bytes = 0
        self.base_bytes = self.file_bytes = 0
        self._lock = threading.Lock()  # no sample from before a reset may come after it
        threading.Thread(target=self._sample, daemon=True).start()

    def start(self) -> None:
        fields = read_status()
        self.base_bytes, self.file_bytes = fields["RssAnon"], fields["RssFile"]
        with self._lock:
            self._reset()

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        with self._lock:
            fields = read_status()
            peak = max(self.sampled_bytes, fields["RssAnon"])
            if self.exact:
                peak = max(peak, fields["VmHWM"] - self.file_bytes)
            self._reset()
        return peak - self.base_bytes

    def _reset(self) -> None:
        self.sampled_bytes = 0
        self.exact = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = True

    def _sample(self) -> None:
        while True:
            with self._lock:
                self.sampled_bytes = max(self.sampled_bytes, read_status()["RssAnon"])
            time.sleep(SAMPLE_S)


def read_status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM")}


def make_params(case: Case, state_mib: int) -> list[nn.Parameter]:
    numel = case.shape[0] * case.shape[1]
    count = max(1, state_mib * MIB // (numel * case.state_bytes))
    params = [nn.Parameter(torch.full(case.shape, 0.5, dtype=case.dtype)) for _ in range(count)]
    grad = torch.rand(case.shape)  # of full rank: Newton-Schulz makes denormals of others, slowly
    for param in params:
        param.grad = grad.to(case.dtype, copy=True)
    return params


def warm_up(case: Case) -> None:
    """Let torch load what a plain step of this kind loads: that is not ours to count."""
    params = [nn.Parameter(torch.ones(64, 64, dtype=case.dtype)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = case.make(params)
    for _ in range(2):
        optimizer.step()


def main() -> None:
    name, state_mib, window, num_steps, ram, directory = sys.argv[1:]
    case = CASES[name]
    warm_up(case)
    params = make_params(case, int(state_mib))
    inner = case.make(params)
    memory = Memory()
    memory.start()
    optimizer = optstream.offload(inner, directory, window=window, ram=ram, codec=case.codec)
    wrapping_bytes = memory.take_peak()
    step_bytes = []
    for _ in range(int(num_steps)):
        optimizer.step()
        step_bytes.append(memory.take_peak())
    plan = optimizer.plan
    optimizer.save(f"{directory}/checkpoint")
    saving_bytes = memory.take_peak()
    optimizer.load(f"{directory}/checkpoint")
    loading_bytes = memory.take_peak()
    optimizer.step()
    step_bytes.append(memory.take_peak())
    optimizer.close()
    memory.take_peak()
    closed_bytes = memory.take_peak()
    result = {
        "bound": plan.peak_host_bytes,
        "bookkeeping": plan.bookkeeping_bytes,
        "state": plan.state_bytes,
        "num_windows": plan.num_windows,
        "resident": plan.resident_bytes,
        "wrapping": wrapping_bytes,
        "steps": step_bytes,
        "saving": saving_bytes,
        "loading": loading_bytes,
        "closed": closed_bytes,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
