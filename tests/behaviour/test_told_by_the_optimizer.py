"""What an optimizer tells of itself: where gradients are, what stands in for its kernels.

And what parameters tell it: attributes that training code put on them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import optstream
from optstream.bound import ScaledGradient

STEPS = 3


class Scaled(torch.optim.Optimizer):
    """Asks each parameter for its scale, as tensor-parallel rules ask for a partition."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param)
                state["sum"].add_(param.grad, alpha=getattr(param, "scale", 1.0))
                param.sub_(state["sum"], alpha=group["lr"])


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype)) for _ in range(3)]
    for number, param in enumerate(params):
        param.scale = number + 0.5  # type: ignore[attr-defined]
    return params


def _gradients(params: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def _train(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    give: Callable[[nn.Parameter, Tensor], None],
) -> None:
    for step in range(STEPS):
        for param, gradient in zip(params, _gradients(params, step), strict=True):
            give(param, gradient)
        optimizer.step()


def _in_grad(param: nn.Parameter, gradient: Tensor) -> None:
    param.grad = gradient


def test_attributes_of_parameters_reach_the_rule(tmp_path: Path) -> None:
    plain, streamed = _params(torch.float32), _params(torch.float32)
    _train(Scaled(plain), plain, _in_grad)
    with optstream.offload(Scaled(streamed), tmp_path) as optimizer:
        _train(optimizer, streamed, _in_grad)
    assert all(torch.equal(a, b) for a, b in zip(plain, streamed, strict=True))


def test_gradients_may_be_elsewhere_and_of_another_dtype(tmp_path: Path) -> None:
    masters = [nn.Parameter(p.detach().float()) for p in _params(torch.bfloat16)]
    plain = torch.optim.AdamW(masters)
    params = _params(torch.bfloat16)
    gradients: dict[int, Tensor] = {}
    inner = torch.optim.AdamW(params)
    inner.gradient_of = lambda param: gradients.get(id(param))  # type: ignore[attr-defined]
    _train(plain, masters, _in_grad)
    with optstream.offload(inner, tmp_path) as optimizer:
        for step in range(STEPS):
            wide = _gradients(masters, step)
            gradients.update({id(p): grad for p, grad in zip(params, wide, strict=True)})
            optimizer.step()
    assert all(p.grad is None for p in params)
    for master, param in zip(masters, params, strict=True):
        assert torch.equal(master.to(torch.bfloat16), param)


def test_a_factor_of_a_gradient_is_applied_in_float32(tmp_path: Path) -> None:
    factor = torch.tensor([1 / 3])
    masters = [nn.Parameter(p.detach().float()) for p in _params(torch.bfloat16)]
    plain = torch.optim.AdamW(masters, weight_decay=0.0)
    params = _params(torch.bfloat16)
    inner = torch.optim.AdamW(params, weight_decay=0.0)
    gradients: dict[int, ScaledGradient] = {}
    inner.gradient_of = lambda param: gradients.get(id(param))  # type: ignore[attr-defined]
    with optstream.offload(inner, tmp_path) as optimizer:
        for step in range(STEPS):
            for master, param, grad in zip(masters, params, _gradients(params, step), strict=True):
                master.grad = grad.float() * factor
                gradients[id(param)] = ScaledGradient(grad, factor)
            plain.step()
            optimizer.step()
        state = optimizer.state_dict()["state"]
    for index, master in enumerate(masters):
        assert torch.equal(master, state[index]["master"])


def test_a_twin_stands_in_where_kernels_know_real_devices_only(tmp_path: Path) -> None:
    class Real(Scaled):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                assert all(
                    type(p) is nn.Parameter and p.device.type == "cpu" for p in group["params"]
                )
            super().step()

    plain, streamed = _params(torch.float32), _params(torch.float32)
    _train(Real(plain), plain, _in_grad)
    inner = Real(streamed)
    inner.layout_twin = lambda: Scaled([torch.empty(0)])  # type: ignore[attr-defined]
    with optstream.offload(inner, tmp_path) as optimizer:
        _train(optimizer, streamed, _in_grad)
    assert all(torch.equal(a, b) for a, b in zip(plain, streamed, strict=True))
