"""Optimizers over parameters on the meta device, as the line of code beside each makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from optstream.muon import Muon, muon_groups


@dataclass(frozen=True)
class Recipe:
    """An optimizer.

    Attributes:
        code: what a user writes for it.
        build: makes it; fused is set afterwards, since torch refuses it for the meta device.
    """

    code: str
    build: Callable[[nn.Module], Optimizer]


RECIPES = {
    "muon": Recipe(
        "optstream.Muon(optstream.muon_groups(model), fused=True)",
        lambda model: Muon(muon_groups(model)),
    ),
    "adamw": Recipe(
        "torch.optim.AdamW(model.parameters(), fused=True)",
        lambda model: torch.optim.AdamW(model.parameters()),
    ),
    "sgd": Recipe(
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)",
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ),
}


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Return an optimizer of a name in RECIPES over a model's parameters."""
    optimizer = RECIPES[name].build(model)
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer
