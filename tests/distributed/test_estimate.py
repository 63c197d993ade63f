"""`optstream plan --ranks` comes to the plans that the ranks then make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import optstream
from optstream.estimate.optimizers import RECIPES, make_optimizer
from optstream.estimate.planning import describe_all, make_plans
from optstream.ram import parse_budget

WINDOW_BYTES = 64 * 2**10


def make_model() -> nn.Module:
    sizes = [(48, 160), (160, 48), (200, 48), (48, 48), (7, 300)]
    model = nn.Module()
    model.embed = nn.Embedding(300, 48)
    model.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
    return model


def plan_of_rank(directory: Path, name: str, ram: str) -> Any:
    """Offload, and return the plan of this rank."""
    model = make_model()
    names = {"torch": __import__("torch"), "optstream": optstream, "model": model}
    optimizer = eval(RECIPES[name].code, names)
    group = dist.group.WORLD
    with optstream.offload(
        optimizer, directory, model=model, window=WINDOW_BYTES, ram=ram, process_group=group
    ) as streamed:
        return streamed.plan


@pytest.mark.parametrize(("name", "ram"), [("muon", "0"), ("adamw", "25%")])
def test_every_rank_has_the_plan_that_was_said(
    name: str, ram: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    model = make_model().to("meta")
    optimizer = make_optimizer(name, model)
    specs = describe_all(model, optimizer, "cpu")
    planned = make_plans(specs, optimizer, WINDOW_BYTES, parse_budget(ram), 3)
    assert planned == ranks(3, plan_of_rank, tmp_path, name, ram)
