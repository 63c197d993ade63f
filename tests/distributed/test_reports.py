"""Each rank tells what it did itself, and what it had from others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import optstream
from distributed.programs import MAKES, make_model, offloaded, set_gradients

Ranks = Callable[..., list[Any]]


def matrices(directory: Path) -> Any:
    """Take steps on equal matrices; return the reports and what the plan says."""
    params = [torch.nn.Parameter(torch.zeros(128, 128)) for _ in range(8)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    with optstream.offload(
        optimizer,
        directory / "state",
        window="64KiB",
        process_group=dist.group.WORLD,
        metrics=directory / "run.jsonl",
    ) as optimizer:
        reports = []
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
            reports.append(asdict(optimizer.report))
        return reports, optimizer.plan.state_bytes, optimizer.plan.written_bytes_per_step


def test_half_the_bytes_each_and_the_parameters_once(ranks: Ranks, tmp_path: Path) -> None:
    [(alone, state_bytes, written_bytes)] = ranks(1, matrices, tmp_path)
    assert alone[0]["exchanged_bytes"] == 0
    assert alone[0]["exchange_wait_s"] == 0
    param_bytes = 8 * 128 * 128 * 4
    for rank, (reports, half_bytes, half_written) in enumerate(ranks(2, matrices, tmp_path)):
        assert half_bytes == state_bytes / 2
        assert half_written == written_bytes / 2
        for report in reports:
            assert report["rank"] == rank
            assert report["exchanged_bytes"] == param_bytes
            assert 0 < report["exchange_wait_s"] < report["total_s"]
        lines = (tmp_path / f"run.rank0000{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == reports


def seldom_gradients(directory: Path) -> Any:
    """Let gradients come and go; more ranks than parameters have state for."""
    model = make_model(torch.bfloat16)
    params = list(model.parameters())
    for param in params[3:]:
        param.requires_grad_(False)
    moved = []
    with offloaded(MAKES["adamw"], model, directory) as optimizer:
        for step in range(4):
            set_gradients(params, step)
            for index, param in enumerate(params):
                if step == 0 or (step == 1 and index > 0) or (step == 2 and index != 5):
                    param.grad = None
            optimizer.step()
            moved.append((optimizer.report.num_windows, optimizer.report.exchanged_bytes))
        values = [param.detach().clone() for param in params]
    return moved, values, sum(param.nbytes for param in params)


def test_parameters_without_gradients_cost_nothing(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4, seldom_gradients, tmp_path)
    size = make_model(torch.bfloat16)
    bytes_of = [param.nbytes for param in size.parameters()]
    for moved, values, total_bytes in found:
        assert [num_bytes for _, num_bytes in moved] == [0, bytes_of[0], bytes_of[5], total_bytes]
        for left, right in zip(values, found[0][1], strict=True):
            assert torch.equal(left, right)
    assert [sum(moved[step][0] > 0 for moved, *_ in found) for step in range(3)] == [0, 1, 1]
