"""What each of Megatron's optimizers holds: which float32 masters, of which model parameters.

    Float16OptimizerWithFloat16Params    whole masters, beside the parameters in float16_groups
    DistributedOptimizer                 masters of flat ranges, this rank's shards of DDP's buffers
    FP32Optimizer                        the parameters themselves

In all of them the master is what the inner torch optimizer has in its groups and, while it steps,
what has the gradient in `.grad`; where DDP reduces in float32 that is a view of DDP's buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter as the inner optimizer holds it.

    Attributes:
        tensor: in the inner optimizer's groups: a float32 master, or a float32 parameter itself.
        param: the model's; `tensor` where there is no master.
        part: flat elements of it that `tensor` is the master of; None: all, in its shape.
    """

    tensor: Tensor
    param: Tensor
    part: slice | None = None

    @property
    def has_master(self) -> bool:
        return self.tensor is not self.param

    @property
    def is_bfloat16(self) -> bool:
        """Whether it is the master of a bfloat16 parameter."""
        return self.has_master and self.param.dtype == torch.bfloat16

    @property
    def reduces_narrow(self) -> bool:
        """Whether DDP reduces its gradient in less than float32."""
        reduced = getattr(self.param, "main_grad", None)
        return reduced is not None and reduced.dtype != torch.float32

    def reduced(self) -> Tensor:
        """Return the gradient in DDP's buffer, of this rank's part."""
        gradient: Tensor = self.param.main_grad  # type: ignore[attr-defined]
        return gradient if self.part is None else gradient.view(-1)[self.part]

    def release(self) -> None:
        """Free a master's storage; the object stays, for its `.grad`, and reads as NaN."""
        if self.has_master:
            empty = torch.full((), torch.nan, dtype=self.tensor.dtype, device=self.tensor.device)
            self.tensor.data = empty.expand(self.tensor.shape)

    def target(self) -> Tensor:
        """Return what an update writes to: the parameter, or a view of this rank's part of it."""
        if self.part is None:
            return self.param
        view = self.param.detach().view(-1)[self.part].requires_grad_()
        vars(view).update(vars(self.tensor))
        return view

    def follow(self, target: Tensor) -> None:
        """Lead a view to the parameter's storage of today, which frameworks move."""
        if self.part is not None:
            today = self.param.detach().view(-1)[self.part]
            if target.data_ptr() != today.data_ptr():
                target.data = today


Groups = list[list[Held]]


def children(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that step a torch optimizer each, however they are chained."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for child in chained:
            yield from children(child)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def held_by(child: Any) -> Groups:
    """Return what a child's inner optimizer holds, in the order of its groups."""
    masters = {id(held.tensor): held for held in _masters(child)}
    return [
        [masters.get(id(tensor)) or Held(tensor, tensor) for tensor in group["params"]]
        for group in child.optimizer.param_groups
    ]


def masters_attribute(child: Any) -> str:
    """Return the name of the child's own lists of masters, by group; "" where it has none."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    return next((name for name in names if hasattr(child, name)), "")


def _masters(child: Any) -> Iterator[Held]:
    attribute = masters_attribute(child)
    if not attribute:
        return
    sharded = attribute.startswith("shard")
    params = child.model_float16_groups if sharded else child.float16_groups
    for group, masters in zip(params, getattr(child, attribute), strict=True):
        for param, master in zip(group, masters, strict=True):
            part = None
            if sharded:
                bounds = child._get_model_param_range_map(param)["param"]
                part = slice(bounds.start, bounds.end)
            yield Held(master, param, part)
