"""`plan.peak_host_bytes` holds on every rank, also where it has whole matrices of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import optstream
from memory.measure import Memory

Ranks = Callable[..., list[Any]]
SHAPE = (2048, 64)  # orthogonalised quickly
LARGE = (2048, 256)  # twice a window


def make(shapes: list[tuple[int, int]], dim: int) -> list[nn.Parameter]:
    """Return bfloat16 parameters with gradients, of which this rank has its part only."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    params = []
    for shape in shapes:
        part = list(shape)
        part[dim] //= size
        tensors = [
            DTensor.from_local(torch.rand(part).bfloat16(), mesh, [Shard(dim)], run_check=False)
            for _ in range(2)
        ]
        params.append(nn.Parameter(tensors[0]))
        params[-1].grad = tensors[1]
    return params


def peaks(directory: Path, dim: int) -> tuple[list[int], int, int]:
    """Return the peaks of wrapping and of each step, what is promised, and the state's bytes."""
    warm = optstream.Muon(make([(64, 64)] * 4, dim), ns_steps=1)
    warm.step()
    params = make([SHAPE] * 160 + [LARGE], dim)
    memory = Memory()
    memory.start()
    optimizer = optstream.offload(
        optstream.Muon(params, ns_steps=1),
        directory,
        window="1MiB",
        process_group=dist.group.WORLD,
    )
    found = [memory.take_peak()]
    for _ in range(3):
        optimizer.step()
        found.append(memory.take_peak())
    return found, optimizer.plan.peak_host_bytes, optimizer.plan.state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_every_rank_keeps_the_bound(ranks: Ranks, tmp_path: Path, dim: int) -> None:
    for found, bound, state_bytes in ranks(2, peaks, tmp_path, dim):
        assert state_bytes > bound
        assert max(found) <= bound
