"""Parameters of which several ranks hold parts, and whose update takes all of them (Muon's)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.distributed.parts import parts_of
from optstream.distributed.shards import check_shard
from optstream.errors import UnsupportedOptimizerError
from optstream.layout import Layout
from optstream.plan import Gathered
from optstream.streamed.rule import gathers, is_elementwise


def gathered(
    name: str, param: Tensor, optimizer: Optimizer, group: Mapping[str, Any]
) -> Gathered | None:
    """Return what the plan is told of a parameter that ranks update together; None for others.

    Raises:
        UnsupportedOptimizerError: a DTensor that this optimizer cannot update; names it.
    """
    together = gathers(optimizer, group, param)
    elementwise = is_elementwise(optimizer, group)
    check_shard(name, param, type(optimizer).__name__, elementwise or together is not None)
    if not together or elementwise:
        return None
    return Gathered(together, parts_of(name, param).largest_numel)


def of_part(name: str, layout: Layout, whole: Tensor, part: Tensor) -> Layout:
    """Return what this rank keeps of a parameter, given what the optimizer keeps for the whole.

    Raises:
        UnsupportedOptimizerError: state of another shape than the parameter's.
    """
    stride = torch.empty_like(part, device="meta").stride()
    for state in layout.tensors:
        if state.shape != tuple(whole.shape):
            raise UnsupportedOptimizerError(
                f"{name} is sharded, and its {state.key!r} of shape {state.shape} has no part that "
                f"belongs to a part of {tuple(whole.shape)}; use DistributedDataParallel"
            )
    shape = tuple(part.shape)
    states = tuple(replace(state, shape=shape, stride=stride) for state in layout.tensors)
    return replace(layout, tensors=states)
