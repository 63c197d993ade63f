"""Ranks that share the state take the steps of one process, bit for bit, and stay equal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import optstream
from distributed.programs import (
    MAKES,
    copies,
    differing,
    make_model,
    offloaded,
    plain_steps,
    set_gradients,
)

STEPS = 3
CASES = [
    ("adamw", torch.float32, "direct"),
    ("sgd", torch.bfloat16, "mapped"),
    ("muon", torch.bfloat16, "direct"),
    ("adamw", torch.float32, "memory"),
]


def train_all(directory: Path) -> list[Any]:
    """Take a few steps with every optimizer; return parameters after each, and the last report."""
    results = []
    for name, dtype, store in CASES:
        model = make_model(dtype)
        with offloaded(MAKES[name], model, directory, store=store) as optimizer:
            seen, reports = [], []
            for step in range(STEPS):
                set_gradients(list(model.parameters()), step)
                optimizer.step()
                seen.append(copies(model))
                reports.append(optimizer.report)
            results.append((seen, reports))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_those_of_one_process(
    size: int, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    by_rank = ranks(size, train_all, tmp_path / "state")
    for index, (name, dtype, store) in enumerate(CASES):
        expected = list(plain_steps(MAKES[name], make_model(dtype), STEPS))
        for rank, results in enumerate(by_rank):
            seen, reports = results[index]
            for step, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
                assert not differing(found, wanted), (name, dtype, rank, step)
            assert {report.rank for report in reports} == {rank}
            assert all(report.num_windows > 0 for report in reports)
            assert sum(report.written_bytes for report in reports) > 0 or store != "direct"
    assert not list(tmp_path.glob("state/*"))


def grows(directory: Path) -> Any:
    """Add a group on the way."""
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(6)]
    model = nn.ParameterList(params)
    with offloaded(lambda _: torch.optim.Adam(params[:3]), model, directory) as optimizer:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": params[3:], "lr": 0.1})
            set_gradients(params if step >= 2 else params[:3], step)
            optimizer.step()
        return [param.detach().clone() for param in params], optimizer.plan.num_windows


def test_a_group_that_comes_later(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    [(expected, num_windows)] = ranks(1, grows, tmp_path)
    found = ranks(3, grows, tmp_path)
    assert sum(each for _, each in found) >= num_windows
    for values, _ in found:
        for left, right in zip(values, expected, strict=True):
            assert torch.equal(left, right)


class Tower(nn.Module):
    """Layers that all take part in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 48))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def train_replicas(directory: Path, make: str) -> Any:
    """Train under DistributedDataParallel, plain and offloaded, each rank on its own rows."""
    found = []
    for share in (False, True):
        model = Tower()
        replica = DistributedDataParallel(model)
        optimizer = MAKES[make](model)
        if share:
            optimizer = optstream.offload(
                optimizer, directory, window="64KiB", process_group=dist.group.WORLD
            )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
            rows = torch.randn(8, 48, generator=generator)
            (replica(rows) - rows.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(copies(model))
        if share:
            optimizer.close()
    return found


@pytest.mark.parametrize(("size", "make"), [(2, "adamw"), (3, "muon")])
def test_under_data_parallelism_they_are_those_of_the_plain_optimizer(
    size: int, make: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    by_rank = ranks(size, train_replicas, tmp_path, make)
    for plain, shared in by_rank:
        assert not differing(shared, plain)
        assert not differing(shared, by_rank[0][1])


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def forgets_the_group(directory: Path) -> Any:
    """Use no process group: every rank keeps all state."""
    model = make_model()
    told = Told()
    logging.getLogger("optstream").addHandler(told)
    with offloaded(MAKES["adamw"], model, directory, process_group=None) as optimizer:
        assert any("this rank keeps all of the state" in text for text in told.texts)
        for step in range(STEPS):
            set_gradients(list(model.parameters()), step)
            optimizer.step()
        return copies(model), optimizer.plan.state_bytes


def test_without_a_group_every_rank_keeps_everything(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    *_, expected = plain_steps(MAKES["adamw"], make_model(), STEPS)
    for found, state_bytes in ranks(2, forgets_the_group, tmp_path):
        assert not differing(found, expected)
        # what has no dimensions stays in memory
        assert state_bytes == sum(2 * p.nbytes for p in make_model().parameters() if p.dim())
