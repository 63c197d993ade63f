"""One model whose parameters lie on ranks in several ways, its steps, and its whole state.

alone        one process
replicated   the same parameters on all ranks, the state shared among them
fsdp         rows split among all ranks
hsdp         rows split in two, each part on half of the ranks
tp           rows split in two over columns or rows split in two: FSDP2 over tensor parallelism
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import optstream
from distributed.programs import MAKES
from optstream.checkpoint.parts import Held
from optstream.distributed.placements import like, region_of
from optstream.distributed.region import Region
from optstream.distributed.shards import here

WINDOW = "64KiB"
Whole = dict[str, Tensor]
"""By name, or by name/key."""


class Net(nn.Module):
    """Rows that do not divide among ranks, fewer rows than ranks, slices and shared windows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(701, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 66)
        self.head = nn.Linear(66, 1)


def make_model(form: str, dtype: torch.dtype, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    if form in ("alone", "replicated"):
        return model
    size = dist.get_world_size()
    if form == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    elif form == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    else:
        both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, both["tensor"], plan)
        mesh = both["data"]
    fully_shard(model, mesh=mesh)
    return model


def part(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a tensor that lies like a parameter."""
    return Held(Region.whole(whole.shape), whole).of(region_of("", param)).contiguous()


def set_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            here(param).copy_(part(weights[name], param))


def step(optimizer: Any, model: nn.Module, number: int) -> None:
    """Step on the same whole gradients in whatever form."""
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * number + index)
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = like(part(grad, param), param)
    optimizer.step()


def offloaded(
    name: str, form: str, model: nn.Module, directory: Path, **more: Any
) -> optstream.StreamedOptimizer:
    group = None if form == "alone" else dist.group.WORLD
    options = {"window": WINDOW, "process_group": group, **more}
    return optstream.offload(MAKES[name](model), directory, model=model, **options)


def whole(values: Tensor) -> Tensor:
    """Return all of a tensor that may be a DTensor, without what it shares memory with."""
    found = values.full_tensor() if hasattr(values, "full_tensor") else values
    return found.detach().clone()


def weights_of(model: nn.Module) -> Whole:
    return {name: whole(param) for name, param in model.named_parameters()}


def state_of(optimizer: Any, model: nn.Module) -> Whole:
    """Return the whole state of the parameters that this rank keeps, or has a shard of."""
    return dict(_state(optimizer, model))


def _state(optimizer: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        if param not in optimizer.state:  # another rank's
            continue
        state = optimizer.state[param]
        for key in state.keys():  # noqa: SIM118 - a view is no Mapping
            value = state[key]
            if isinstance(value, Tensor) and value.dim() and not hasattr(value, "placements"):
                value = like(value, param)
            yield f"{name}/{key}", whole(torch.as_tensor(value))


def of_all(found: list[Whole]) -> Whole:
    """Return what ranks have together; where several have the same it must be the same."""
    together: Whole = {}
    for each in found:
        for name, value in each.items():
            assert torch.equal(together.setdefault(name, value), value), name
    return together


def differing(left: Whole, right: Whole) -> list[str]:
    """Return the names of what is not there or differs in any bit."""
    names = left.keys() ^ right.keys()
    return [*names, *(n for n in left.keys() & right.keys() if not _same(left[n], right[n]))]


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (left, right)))
