"""Names belong to places in the groups: parameters come, go and are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import ConfigError


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def names(optimizer: optstream.StreamedOptimizer) -> list[str]:
    return [spec.name for spec in optimizer.plan.params]


def test_a_replaced_parameter_keeps_its_name_in_a_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    with optstream.offload(inner, tmp_path / "state", model=model) as optimizer:
        step(optimizer)
        for _ in range(20):  # ids of those that went are used again
            for position in (0, 1):
                old = optimizer.param_groups[0]["params"][position]
                optimizer.param_groups[0]["params"][position] = nn.Parameter(old.detach().clone())
                del old
        step(optimizer)
        optimizer.save(tmp_path / "checkpoint")
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    with optstream.offload(inner, tmp_path / "state", model=model) as optimizer:
        optimizer.load(tmp_path / "checkpoint")
        assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())


def test_a_later_group_has_the_models_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = torch.optim.AdamW(model[0].parameters())
    with optstream.offload(inner, tmp_path, model=model) as optimizer:
        optimizer.add_param_group({"params": list(model[1].parameters())})
        assert names(optimizer) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_group_with_a_name_that_is_taken_is_not_added(tmp_path: Path) -> None:
    first, second = nn.Parameter(torch.randn(10)), nn.Parameter(torch.randn(10))
    inner = torch.optim.AdamW([("w", first)])
    with optstream.offload(inner, tmp_path) as optimizer:
        with pytest.raises(ConfigError, match="named 'w'"):
            optimizer.add_param_group({"params": [("w", second)]})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [("v", second)]})
        step(optimizer)
        assert names(optimizer) == ["w", "v"]
        assert set(optimizer.state) == {first, second}


def test_state_is_found_of_a_parameter_that_replaced_another(tmp_path: Path) -> None:
    old, new = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    with optstream.offload(torch.optim.AdamW([old]), tmp_path) as optimizer:
        step(optimizer)
        assert optimizer.state[old]["step"] == 1
        optimizer.param_groups[0]["params"][0] = new
        assert optimizer.state[new]["step"] == 1
        with pytest.raises(KeyError):
            optimizer.state[old]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", 5),
        ("model", [nn.Linear(2, 2)]),
        ("model", nn.Linear(2, 2)),
        ("store", []),
        ("master_weights", "x"),
    ],
)
def test_an_argument_that_cannot_be_used(argument: str, value: object, tmp_path: Path) -> None:
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(8))])
    options: dict[str, Any] = {argument: value}
    with pytest.raises(ConfigError, match=argument):
        optstream.offload(inner, tmp_path, **options)
