"""Rules that count steps in their groups, as fused kernels do, even where nothing is to be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import optstream


class Counting(torch.optim.Optimizer):
    """Counts for every group that has parameters, whether these have gradients or not."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(state["sum"], alpha=group["lr"] / group["count"])


def _groups() -> list[dict[str, Any]]:
    return [
        {"params": [nn.Parameter(torch.ones(4))]},
        {"params": [nn.Parameter(torch.ones(4))]},  # gets no gradient
        {"params": []},
    ]


def test_groups_count_as_they_do_in_memory(tmp_path: Path) -> None:
    plain, inner = Counting(_groups()), Counting(_groups())
    with optstream.offload(inner, tmp_path) as streamed:
        for optimizer in (plain, streamed):
            for _ in range(3):
                optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
                optimizer.step()
        for ours, theirs in zip(streamed.param_groups, plain.param_groups, strict=True):
            assert ours.get("count") == theirs.get("count")
        assert [group.get("count") for group in plain.param_groups] == [3, 3, None]
    weights = (optimizer.param_groups[0]["params"][0] for optimizer in (plain, inner))
    assert torch.equal(*weights)
