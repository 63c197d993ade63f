"""An AdamW with the state of the fused ones that Megatron uses on GPUs. For tests only.

Without Transformer Engine or Apex megatron-core falls back on torch's AdamW, which keeps a `step`
tensor in every parameter's state. The fused ones keep `step` as a number in the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class FusedAdam(torch.optim.Optimizer):
    """Named like Transformer Engine's and Apex's, which it stands in for."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        grad, state, step = param.grad, self.state[param], group["step"]
        assert grad is not None
        assert param.device.type != "meta", "its kernels are for real devices only"
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if self.adam_w_mode:
            param.mul_(1 - lr * decay)
        else:
            grad = grad.add(param, alpha=decay)
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        param.addcdiv_(mean, scale, value=-lr / (1 - beta1**step))


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Make megatron-core's factory build FusedAdam, as where Transformer Engine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(
            distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True
        ),
    ):
        yield
