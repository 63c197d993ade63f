"""Parameters that ranks hold in parts (DTensor of FSDP2 or HSDP): what of a tensor is on this rank.

A DTensor is told by its placements, so that programs without any need not import them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from optstream.errors import ConfigError, UnsupportedOptimizerError

Value = TypeVar("Value")


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether other ranks hold other parts of this tensor."""
    return bool(split_dims(tensor))


def split_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a DTensor's mesh over which it is split; none for plain tensors."""
    placements = getattr(tensor, "placements", ())
    return tuple(
        dim
        for dim, placement in enumerate(placements)
        if not placement.is_replicate() and mesh_of(tensor).size(dim) > 1
    )


def mesh_of(tensor: Tensor) -> Any:
    """Return the DeviceMesh of a DTensor."""
    return tensor.device_mesh  # type: ignore[attr-defined]


def here(value: Value) -> Value:
    """Return this rank's part of a DTensor, in the same storage; anything else is its own."""
    if not hasattr(value, "placements"):
        return value
    with torch.no_grad():
        return value.to_local().detach()  # type: ignore[attr-defined,no-any-return]


def as_part(part: Tensor, whole: Tensor | None) -> Tensor:
    """Return this rank's part of something as a DTensor laid out as `whole`, in the same storage.

    None stands for what is not sharded.
    """
    if whole is None:
        return part
    from torch.distributed.tensor import DTensor

    # without the shape torch would take all parts for as large as this one
    return DTensor.from_local(
        part,
        mesh_of(whole),
        whole.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def check_sum(name: str, param: Tensor) -> None:
    """Refuse a DTensor that is a sum still to be made.

    Raises:
        UnsupportedOptimizerError: the message names the parameter.
    """
    placements = getattr(param, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedOptimizerError(
            f"{name} is a DTensor with a sum that is still to be made ({placements}); give the "
            "optimizer what redistribute() makes of it"
        )


def check_shard(name: str, param: Tensor, rule: str, updates: bool) -> None:
    """Refuse a DTensor that the optimizer cannot update.

    Args:
        rule: name of the optimizer.
        updates: whether it can update this rank's part, by itself or together with other ranks.

    Raises:
        UnsupportedOptimizerError: the message names the parameter.
    """
    check_sum(name, param)
    if is_sharded(param) and not updates:
        raise UnsupportedOptimizerError(
            f"{name} is sharded ({param.placements}), and {rule} needs whole parameters: the "  # type: ignore[attr-defined]
            "update of a shard by itself would be another one; give it to optstream.Muon or an "
            "elementwise rule (AdamW, SGD; a class of your own says so with "
            "is_elementwise(group)), or train with DistributedDataParallel and process_group="
        )


def check_shard_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    """Refuse a gradient whose part here is not that of the parameter's part.

    Raises:
        UnsupportedOptimizerError: the message names the parameter.
    """
    of_param, of_grad = (getattr(tensor, "placements", None) for tensor in (param, grad))
    if of_param != of_grad:
        raise UnsupportedOptimizerError(
            f"{name} has the placements {of_param} and its gradient {of_grad}; before step() make "
            "them equal: param.grad = param.grad.redistribute(placements=param.placements)"
        )


def shard_norms(
    params: Sequence[tuple[int, Tensor]], norm_type: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield the row of each sharded parameter, its whole gradient's norm and whether there is one.

    The ranks of a mesh call it with the same parameters; each mesh is asked once for all of its.

    Raises:
        ConfigError: `norm_type` is not positive.
    """
    if params and not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} of sharded gradients; give a positive one or inf")
    meshes: dict[Any, list[tuple[int, Tensor]]] = {}
    for row, param in params:
        meshes.setdefault((mesh_of(param), split_dims(param)), []).append((row, param))
    for (mesh, dims), members in meshes.items():
        table = torch.stack([_power(param, norm_type) for _, param in members])
        for dim in dims:
            operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(table, operation, group=mesh.get_group(dim))
        norms = table[:, 0] if math.isinf(norm_type) else table[:, 0] ** (1 / norm_type)
        found = torch.stack([norms, table[:, 1].sign()], dim=1).cpu()
        yield from zip((row for row, _ in members), found, strict=True)


def _power(param: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a gradient's part here, to be added up, and 1; zeros where none is."""
    part = here(param if param.grad is None else param.grad)
    power = torch.zeros(2, dtype=torch.float64, device=part.device)
    if param.grad is None:
        return power
    power[1] = 1
    if part.numel():
        wide = torch.float32 if part.dtype in (torch.bfloat16, torch.float16) else part.dtype
        norm = torch.linalg.vector_norm(part, norm_type, dtype=wide).double()
        power[0] = norm if math.isinf(norm_type) else norm**norm_type
    return power
