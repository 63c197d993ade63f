"""Checkpoints that earlier versions made, kept here as they were, and are read for ever.

`made` made them; what is in it are sums of powers of two, the same on every machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optstream
from optstream.checkpoint.directory import open_checkpoint

HERE = Path(__file__).parent
STEPS = 2
VERSIONS = {1: (torch.float32, "exact"), 2: (torch.bfloat16, "split")}


def made(dtype: torch.dtype, codec: str, directory: Path) -> optstream.StreamedOptimizer:
    names = ("weight", "bias")
    params = [
        nn.Parameter(torch.arange(15, dtype=dtype).view(3, 5)),
        nn.Parameter(torch.ones(4, dtype=dtype)),
    ]
    group = [{"params": params, "param_names": names}]
    optimizer = torch.optim.SGD(group, lr=0.25, momentum=0.5)
    return optstream.offload(optimizer, directory, codec=codec)


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            pattern = torch.arange(param.numel()).view(param.shape) % 7 + number
            param.grad = pattern.to(param.dtype) / 64
    optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    params = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    return [*params, *(value.clone() for state in states for value in state.values())]


@pytest.mark.parametrize("version", VERSIONS)
def test_is_read(version: int, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(HERE / f"version{version}", checkpoint)
    assert open_checkpoint(checkpoint).manifest.version == version
    optstream.verify(checkpoint)
    dtype, codec = VERSIONS[version]
    with made(dtype, codec, tmp_path / "a") as first, made(dtype, codec, tmp_path / "b") as second:
        for number in range(STEPS):
            step(first, number)
        for new, old in zip(
            second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True
        ):
            new.data.copy_(old.data)
        second.load(checkpoint)
        found, wanted = state_of(second), state_of(first)
        assert len(found) == len(wanted) == (4 if version == 1 else 6)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        step(first, STEPS)
        step(second, STEPS)
        assert all(
            torch.equal(a, b) for a, b in zip(state_of(first), state_of(second), strict=True)
        )
