"""Gradients that DDP reduces in bfloat16 (float16) are cast window by window, not all at once.

Megatron would give every master a float32 copy in `.grad` before the first update. Norm, clipping
and loss scaling ask an optimizer for its parameters and look at their `.grad` alone, so that they
are given small ones instead, and go on unchanged:

    a stand-in of each master   grad = [norm of its gradient]   counts in a norm as the master would
    a factor                    grad = [1.0], marked as shared  counts in none, is scaled with all

What loss scaling and clipping have made of the factor is applied in the window, in float32.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from optstream.bound import ScaledGradient
from optstream.errors import ConfigError
from optstream.integrations.megatron.held import Groups, Held, masters_attribute


class Gradients:
    """The gradients of one of Megatron's optimizers, from `prepare_grads` to the step."""

    def __init__(self, child: Any, held: Groups) -> None:
        """Take over what the child does before a step, where its gradients need a cast.

        Raises:
            ConfigError: zeros are to be counted in gradients that are never there in float32.
        """
        self._child = child
        self._held = list(chain.from_iterable(held))
        self._stand_ins: dict[int, Tensor] = {}
        self._factors: dict[str | None, Tensor] = {}
        masters = [one for one in self._held if one.has_master]
        self._narrow = bool(masters) and all(one.reduces_narrow for one in masters)
        if not self._narrow:
            return
        if child.config.log_num_zeros_in_grad:
            raise ConfigError(
                "--log-num-zeros-in-grad counts in float32 gradients of all parameters, which are "
                "never in memory together; reduce gradients in float32 (no --grad-reduce-in-bf16) "
                "or drop it"
            )
        self._prepare_others = child._copy_model_grads_to_main_grads
        child._copy_model_grads_to_main_grads = self._prepare
        child._collect_main_grad_data_for_unscaling = self._to_unscale
        child.get_parameters = self._parameters

    def of(self, one: Held) -> Tensor | ScaledGradient | None:
        """Return the gradient of what the inner optimizer holds, as `prepare_grads` left it."""
        if not (self._narrow and one.has_master):
            return one.tensor.grad
        factor = self._factors.get(_norm_group(one)) if self._stand_ins else None
        if factor is None or factor.grad is None:
            return None
        return ScaledGradient(one.reduced(), factor.grad)

    def _prepare(self) -> None:
        child, attribute = self._child, masters_attribute(self._child)
        masters = getattr(child, attribute)
        setattr(child, attribute, [[] for _ in masters])
        try:
            self._prepare_others()  # parameters without a master
        finally:
            setattr(child, attribute, masters)
        self._stand_ins, self._factors = {}, {}
        for one in self._held:
            if one.has_master:
                norm = torch.norm(one.reduced().float())
                self._stand_ins[id(one)] = _small(norm, one)
                self._factors.setdefault(_norm_group(one), _factor(one))

    def _parameters(self) -> list[Tensor]:
        held = [self._stand_ins.get(id(one), one.tensor) for one in self._held]
        return [*held, *self._factors.values()]

    def _to_unscale(self) -> list[Tensor]:
        return [param.grad for param in self._parameters() if param.grad is not None]


def _norm_group(one: Held) -> str | None:
    """Return which of Megatron's separately clipped groups it is in."""
    return getattr(one.tensor, "grad_norm_group", None)


def _small(grad: Tensor, one: Held) -> Tensor:
    """Return a parameter of one element; in all else Megatron sees the master."""
    small = torch.zeros(1, dtype=torch.float32, device=grad.device)
    vars(small).update(vars(one.tensor))
    small.grad = grad.reshape(1)
    return small


def _factor(one: Held) -> Tensor:
    factor = _small(torch.ones((), dtype=torch.float32, device=one.tensor.device), one)
    factor.shared = True  # type: ignore[attr-defined]
    return factor
