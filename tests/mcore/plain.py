"""Megatron as it is, without optstream: the shim must let it train before anything else counts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore.gpt import ADAM, DIST_MUON, MUON, MUON_DEALT, Recipe, Training


def _equal_over(group: dist.ProcessGroup, weights: list[torch.Tensor]) -> bool:
    flat = torch.cat([weight.float().flatten() for weight in weights])
    others = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(others, flat, group=group)
    return all(torch.equal(flat, other) for other in others)


def trains(recipe: Recipe) -> None:
    """The loss falls, and ranks that should have the same weights have them."""
    training = Training(recipe)
    steps = training.steps(3)
    losses = [loss for _, loss, _ in steps]
    assert all(applied for applied, _, _ in steps)
    assert losses == sorted(losses, reverse=True), losses
    assert losses[0] - losses[-1] > 0.5, losses
    params = list(training.ddp.parameters())
    assert _equal_over(parallel_state.get_data_parallel_group(), [p.detach() for p in params])
    unsplit = [p.detach() for p in params if not getattr(p, "tensor_model_parallel", False)]
    assert _equal_over(parallel_state.get_tensor_model_parallel_group(), unsplit)


def adam() -> None:
    trains(ADAM)


def muon() -> None:
    trains(MUON)


def muon_dealt() -> None:
    trains(MUON_DEALT)


def dist_muon() -> None:
    trains(DIST_MUON)
