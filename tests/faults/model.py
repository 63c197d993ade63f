"""A small model whose state fills more windows of 64 KiB than there are slots."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((400, 100), (7,), (300, 100))
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def set_grads(params: Iterable[Tensor], step: int) -> None:
    """Give every parameter the gradient that belongs to this step, the same in every run."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def reference(dtype: torch.dtype, num_steps: int) -> list[Tensor]:
    """Return the parameters after so many steps of the plain optimizer, over float32 masters."""
    params = make_params(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = make_optimizer(masters)
    for step in range(num_steps):
        set_grads(params, step)
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        optimizer.step()
    return [master.detach().to(dtype) for master in masters]


def assert_same(actual: Iterable[Tensor], expected: Iterable[Tensor], what: object = "") -> None:
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left.detach(), right), what
