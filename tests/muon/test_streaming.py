"""Muon with its state in windows: the bits of the plain optimizer, at every window size."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optstream import offload
from optstream.muon import Muon, muon_groups


class Block(nn.Module):
    """Matrices of several shapes, fused QKV, experts, a head that outgrows a window, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1200, 32)
        self.qkv = nn.Linear(32, 96)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.square = nn.Linear(32, 32)
        self.experts = nn.Parameter(torch.empty(4, 48, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 1200, bias=False)


def model(dtype: torch.dtype) -> Block:
    block = Block()
    for index, param in enumerate(block.parameters()):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        param.data = values.to(dtype)
    return block


def groups(block: Block) -> list[dict[str, Any]]:
    return muon_groups(
        block, weight_decay=0.1, overrides={"experts": {"split": ("stack", ("equal", 2))}}
    )


def step(optimizer: torch.optim.Optimizer, params: list[Tensor], number: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * number + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum_mode": "classical", "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"ns_coefficients": "polar_express", "cautious_weight_decay": True, "fused": True},
    {"ns_dtype": "bfloat16", "maximize": True, "lr": torch.tensor(0.03)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("window", "store"),
    [("64KiB", "memory"), ("96KiB", "memory"), ("64MiB", "memory"), ("96KiB", "direct")],
)
def test_streamed_is_bit_for_bit_the_plain_optimizer(
    window: str,
    store: str,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    plain, streamed = model(torch.float32), model(torch.float32)
    optimizer = Muon(groups(plain), **options)
    with offload(Muon(groups(streamed), **options), tmp_path, window=window, store=store) as o:
        assert (o.plan.num_windows > 3) == (window != "64MiB")
        for number in range(3):
            step(optimizer, list(plain.parameters()), number)
            step(o, list(streamed.parameters()), number)
        for (name, a), b in zip(plain.named_parameters(), streamed.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_bfloat16_parameters_follow_their_float32_masters(tmp_path: Path) -> None:
    masters, streamed = model(torch.bfloat16).float(), model(torch.bfloat16)
    optimizer = Muon(groups(masters))
    with offload(Muon(groups(streamed)), tmp_path, window="64KiB", store="memory") as o:
        for number in range(3):
            step(o, list(streamed.parameters()), number)
            for a, b in zip(masters.parameters(), streamed.parameters(), strict=True):
                assert b.grad is not None
                a.grad = b.grad.float()
            optimizer.step()
        for (name, a), b in zip(masters.named_parameters(), streamed.parameters(), strict=True):
            assert torch.equal(a.to(torch.bfloat16), b), name


def test_only_matrices_are_kept_whole(tmp_path: Path) -> None:
    muon = Muon(groups(model(torch.float32)))
    with offload(muon, tmp_path, window="64KiB", store="memory") as o:
        pieces = Counter(piece.param for window in o.plan.windows for piece in window.pieces)
        cut = {o.plan.params[index].name for index, count in pieces.items() if count > 1}
    assert cut == {"tokens.weight", "head.weight"}
