"""Ranks that update matrices together: what fails on one ends the step on all, and none hangs."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import optstream
from optstream.distributed import gathering
from optstream.muon import sharded

Ranks = Callable[..., list[Any]]
SHAPES = [(64 + n % 2, 128) for n in range(12)]


def spread(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)  # all have it


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make() -> optstream.Muon:
    """Return an optimizer with two kinds of windows: shared matrices, and one rank's own slices."""
    params = [nn.Parameter(spread(random(shape, n))) for n, shape in enumerate(SHAPES)]
    tables = [nn.Parameter(spread(random((200, 64), n))) for n in range(6)]
    owned = [nn.Parameter(random((50, 64), n)) for n in range(6)]
    groups = [{"params": params}, {"params": tables + owned, "use_muon": False}]
    return optstream.Muon(groups, lr=0.1)


def offloaded(directory: Path) -> optstream.StreamedOptimizer:
    return optstream.offload(make(), directory, window="64KiB", process_group=dist.group.WORLD)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, param in enumerate(params_of(optimizer)):
        grad = random(tuple(param.shape), 100 * step + index)
        param.grad = spread(grad) if isinstance(param, DTensor) else grad


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_at(name: str, number: int) -> Callable[[], None]:
    """Let one of the next calls of an os function fail; return what mends it."""
    real, left = getattr(os, name), [number]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    setattr(os, name, failing)
    return lambda: setattr(os, name, real)


def differing(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> list[int]:
    found = []
    for index, (a, b) in enumerate(zip(params_of(left), params_of(right), strict=True)):
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            a, b = a.to_local(), b.to_local()
        if not torch.equal(a, b):
            found.append(index)
    return found


def transfers_fail(directory: Path) -> Any:
    """Let a transfer of rank 1 fail at several places of a scan; finish the step every time."""
    plain = make()
    found = []
    with offloaded(directory) as optimizer:
        for step, number in enumerate([0, 1, 2, 5, 1, 4, 7]):
            give_gradients(plain, step)
            give_gradients(optimizer, step)
            plain.step()
            mend = fail_at("preadv", number if dist.get_rank() == 1 else 0)
            start, errors = time.monotonic(), []
            for _ in range(3):
                errors.append(error_of(optimizer.step))
                if not errors[-1]:
                    break
            mend()
            found.append((errors, time.monotonic() - start))
        return found, differing(plain, optimizer)


def test_a_failed_read_is_made_good(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(3, transfers_fail, tmp_path)
    for rank, (found, differ) in enumerate(by_rank):
        assert differ == []
        for errors, took_s in found:
            assert errors[-1] == ""
            assert took_s < 20
        failed = [errors[0] for errors, _ in found if errors[0]]
        assert len(failed) >= 4
        own = "WindowReadError: cannot read" if rank == 1 else "RankError: rank 1 failed: cannot"
        assert all(text.startswith(own) for text in failed), failed


def computing_fails(directory: Path) -> Any:
    with offloaded(directory) as optimizer:
        give_gradients(optimizer, 0)
        optimizer.step()
        before = [param.detach().clone() for param in params_of(optimizer)]
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:

                def fail(*args: Any) -> Tensor:
                    raise MemoryError("no memory for it")

                patch.setattr(sharded, "orthogonalised", fail)
            errors = [error_of(optimizer.step)]
        errors.append(error_of(optimizer.step))
        still = [torch.equal(a, b) for a, b in zip(before, params_of(optimizer), strict=True)]
    return errors, any(still)


def test_a_failed_update_is_not_gone_on_with(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(2, computing_fails, tmp_path)
    (first, _), (own, _) = by_rank
    assert own[0] == "MemoryError: no memory for it"
    assert first[0].startswith("RankError: rank 1 failed: MemoryError: no memory for it")
    for errors, _ in by_rank:
        assert errors[1].startswith("RankError: a step failed while ranks updated matrices")
        assert errors[1].endswith("load a checkpoint")


def no_agreement(directory: Path) -> list[str]:
    """Return what is said of steps and wraps that ranks cannot do together."""
    errors = []
    with offloaded(directory) as optimizer:
        give_gradients(optimizer, 0)
        if dist.get_rank() == 1:
            params_of(optimizer)[3].grad = None
        errors.append(error_of(optimizer.step))
        for param in params_of(optimizer)[:12]:
            param.grad = None  # no matrix has one: windows of the others move
        errors.append(error_of(optimizer.step))
        assert optimizer.report is not None
        assert optimizer.report.num_windows > 0
    errors.append(error_of(lambda: optstream.offload(make(), directory)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    early = optstream.Muon(model.parameters(), lr=0.1)
    streamed = optstream.offload(early, directory, model=model, process_group=dist.group.WORLD)
    with streamed:
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        errors.append(error_of(streamed.step))  # the optimizer still has what the model had
        for index, param in enumerate(model.parameters()):
            streamed.param_groups[0]["params"][index] = param
        errors.append(error_of(streamed.step))
    mesh = init_device_mesh("cpu", (2,))
    rows = 1 + 2 * dist.get_rank()  # torch would give each rank two
    odd = DTensor.from_local(
        torch.ones(rows, 4), mesh, [Shard(0)], run_check=False, shape=(4, 4), stride=(4, 1)
    )
    errors.append(error_of(lambda: optstream.Muon([nn.Parameter(odd)])))
    return errors


def test_what_ranks_cannot_do_together(ranks: Ranks, tmp_path: Path) -> None:
    for errors in ranks(2, no_agreement, tmp_path):
        assert "parameter 3 of group 0 has a gradient on rank 0 and none on rank 1" in errors[0]
        assert errors[1] == ""
        assert errors[2].startswith("ConfigError: group0.param0 is sharded over the ranks [0, 1]")
        assert "process_group=torch.distributed.group.WORLD" in errors[2]
        for text in errors[3:5]:
            assert re.match(r"ModelChangedError: [01].weight", text), text
            assert "fully_shard" in text
        assert "parameter 0 of the group of shape (4, 4)" in errors[5]
        assert "cannot be gathered" in errors[5]


def bytes_sent() -> tuple[int, int]:
    """Return what this rank sent in a step, and the bytes of all updates."""
    optimizer = make()
    give_gradients(optimizer, 0)
    sent = [0]
    real = gathering._Mail.send

    def count(self: Any, part: Tensor, *where: Any) -> None:
        sent[0] += part.nbytes
        real(self, part, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering._Mail, "send", count)
        optimizer.step()
    return sent[0], sum(4 * rows * cols for rows, cols in SHAPES)


def test_updates_go_and_come_once(ranks: Ranks) -> None:
    by_rank = ranks(3, bytes_sent)
    total_bytes = by_rank[0][1]
    sent = [num_bytes for num_bytes, _ in by_rank]
    assert 1.2 * total_bytes < sum(sent) <= 2 * total_bytes
    assert max(sent) < 1.1 * sum(sent) / 3
