"""What benchmarks share: parameters with gradients, and contestants that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Timed = dict[str, list[float]]
"""Seconds of each round, by contestant."""


def make_params(num_params: int, tensors: int = 16) -> list[torch.nn.Parameter]:
    """Return float32 parameters with gradients, touched, of about `num_params` elements in all."""
    params = []
    for _ in range(tensors):
        param = torch.nn.Parameter(torch.full((num_params // tensors // 1024, 1024), 0.5))
        param.grad = torch.full_like(param, 1e-3)
        params.append(param)
    return params


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run_rounds(contestants: dict[str, Callable[[], object]], rounds: int) -> Timed:
    for call in contestants.values():
        call()
    seconds: Timed = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            seconds[name].append(timed(call))
    return seconds
