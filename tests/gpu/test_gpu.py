"""On a CUDA machine: the checks of benchmarks/gpu_check.py, and what only a device can show."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import optstream
from optstream.stream.lane import CudaLane
from optstream.stream.slots import allocate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", ["check_parity", "check_stress", "check_memory"])
def test_check(check: str, gpu_check: ModuleType, gpu: torch.device, tmp_path: Path) -> None:
    outcomes = list(getattr(gpu_check, check)(gpu, tmp_path))
    assert outcomes
    assert [outcome for outcome in outcomes if not outcome.ok] == []


def test_slots_are_pinned_as_they_are(gpu: torch.device) -> None:
    """Registering keeps the size; torch's own pinned memory may be rounded up."""
    slot = allocate(3 * 2**20)
    lane = CudaLane(gpu, 3 * 2**20)
    unpin = lane.pin(slot.tensor)
    try:
        assert slot.tensor.is_pinned()
    finally:
        lane.settle()
        unpin()
    assert not slot.tensor.is_pinned()


def test_new_buffers_wait_for_work_on_the_memory_they_get(gpu: torch.device) -> None:
    """The allocator hands out memory that queued work still uses; loads must not overtake it."""
    num_bytes = 64 * 2**20
    host = torch.full((num_bytes,), 7, dtype=torch.uint8).pin_memory()
    for _ in range(10):
        old = [torch.empty(num_bytes, dtype=torch.uint8, device=gpu) for _ in range(2)]
        torch.cuda._sleep(20_000_000)
        for buffer in old:
            buffer.fill_(1)
        del old, buffer  # the next buffers of this size are these
        lane = CudaLane(gpu, num_bytes)
        buffer = lane.load(host)
        lane.wait_loaded()
        assert bool((buffer == 7).all())


def test_parameters_on_two_devices(tmp_path: Path, gpu: torch.device) -> None:
    """Also a CPU and a GPU: windows of each go through a lane of their own, slots are pinned."""
    devices = [torch.device("cpu"), gpu]
    if torch.cuda.device_count() > 1:
        devices.append(torch.device("cuda", 1))
    results = []
    for streamed in (False, True):
        params = [nn.Parameter(torch.full((300, 300), 0.5, device=device)) for device in devices]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.01)
        if streamed:
            optimizer = optstream.offload(optimizer, tmp_path, window="64KiB")
        for _ in range(5):
            for param in params:
                param.grad = torch.full_like(param, 0.1)
            optimizer.step()
        if isinstance(optimizer, optstream.StreamedOptimizer):
            optimizer.close()
        results.append([param.detach().cpu() for param in params])
    assert all(map(torch.equal, *results))
