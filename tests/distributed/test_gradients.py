"""Averages and the common norm of gradients, whoever has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optstream
from distributed.programs import (
    MAKES,
    copies,
    differing,
    make_model,
    offloaded,
    set_gradients,
)

Ranks = Callable[..., list[Any]]


def average(params: list[Tensor]) -> None:
    """Average gradients as DistributedDataParallel does, on every rank."""
    for param in params:
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad = grad.contiguous().mul_(1 / dist.get_world_size())
        dist.all_reduce(param.grad)


def reduced_and_averaged(directory: Path, dtype: torch.dtype) -> Any:
    """Step on reduced gradients and on averaged ones; return both and who had what."""
    found = []
    held: list[str] = []
    for reduced in (True, False):
        model = make_model(dtype)
        params = list(model.parameters())
        with offloaded(MAKES["muon"], model, directory) as optimizer:
            for step in range(2):
                set_gradients(params, step, dist.get_rank())
                if dist.get_rank() == 1:
                    params[0].grad = None  # others have it
                params[1].grad = None  # nobody has it
                if reduced:
                    optstream.reduce_to_owner(optimizer)
                    held = [n for n, p in model.named_parameters() if p.grad is not None]
                    norm = optstream.clip_grad_norm_(optimizer, 1.0)
                else:
                    average(params[:1] + params[2:])
                    norm = optstream.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
            found.append((copies(model), norm))
    return found, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_to_owners_they_are_the_averages(
    dtype: torch.dtype, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(2, reduced_and_averaged, tmp_path, dtype)
    names = [name for name, _ in make_model().named_parameters()]
    owned = [name for _, held in results for name in held]
    assert sorted(owned) == sorted(set(names) - {names[1]})
    for [(reduced, norm), (averaged, expected)], _ in results:
        assert not differing(reduced, averaged)
        assert torch.equal(norm, expected)


def norms(directory: Path, dtype: torch.dtype) -> Any:
    """Return norms from our function and torch's over equal gradients, and clipped gradients."""
    found = []
    for norm_type in (2.0, 1.0, torch.inf):
        model = make_model(dtype)
        params = [param for param in model.parameters() if param.numel()]  # torch's inf needs one
        with offloaded(MAKES["adamw"], model, directory) as optimizer:
            set_gradients(params, 0)
            params[2].grad = None
            ours = optstream.clip_grad_norm_(optimizer, 0.5, norm_type)
            clipped = [None if p.grad is None else p.grad.clone() for p in params]
            set_gradients(params, 0)
            params[2].grad = None
            torchs = torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type)
            expected = [None if p.grad is None else p.grad.clone() for p in params]
        found.append((ours, torchs, clipped, expected))
    return found


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_the_norm_is_that_of_one_process(
    size: int, dtype: torch.dtype, ranks: Ranks, tmp_path: Path
) -> None:
    for results in ranks(size, norms, tmp_path, dtype):
        for ours, torchs, clipped, expected in results:
            assert ours.dtype == torchs.dtype
            assert torch.equal(ours, torchs)
            for left, right in zip(clipped, expected, strict=True):
                assert (left is None and right is None) or torch.equal(left, right)


def norm_of_nothing(directory: Path) -> Any:
    model = make_model()
    with offloaded(MAKES["sgd"], model, directory) as optimizer:
        nothing = optstream.clip_grad_norm_(optimizer, 1.0)
        set_gradients(list(model.parameters()), 0)
        if dist.get_rank() == 0:
            model.layers[0].weight.grad.fill_(torch.nan)
        else:
            model.layers[0].weight.grad.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="is nan, so they cannot be clipped"):
            optstream.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        return nothing


def test_no_gradients_and_no_finite_ones(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, norm_of_nothing, tmp_path) == [torch.tensor(0.0)] * 2
