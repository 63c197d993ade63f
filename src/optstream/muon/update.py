"""Muon's rule for one parameter: momentum, Newton-Schulz on each of its matrices, decay, step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from optstream.muon.coefficients import schedule
from optstream.muon.newton_schulz import (
    default_ns_dtype,
    newton_schulz,
    newton_schulz_flops,
    uses_gram,
)
from optstream.muon.splits import block_shapes, blocks

# On an accelerator equal matrices of ONE parameter share a batch of at most so many bytes; a CPU
# takes them one by one. Parameters never share one, so a window's contents do not change a bit.
_BATCH_BYTES = 64 << 20


def muon_flops(shape: Sequence[int], group: dict[str, Any]) -> int:
    """Count Newton-Schulz's operations in one update on a CPU, for balancing work; AdamW's is 0.

    Args:
        shape: of the parameter.
        group: its group's options.
    """
    if not group["use_muon"]:
        return 0
    coefficients = schedule(group["ns_coefficients"], group["ns_steps"])
    device = torch.device("cpu")
    dtype = ns_dtype(group, torch.empty(0, device=device))
    flops = 0
    for count, rows, cols in block_shapes(shape, group["split"], group["transposed"]):
        gram = uses_gram(rows, cols, dtype, device)
        flops += count * newton_schulz_flops(rows, cols, coefficients, gram=gram)
    return flops


def update_matrices(group: dict[str, Any], param: Tensor, grad: Tensor, buffer: Tensor) -> None:
    """Update one parameter and its momentum in place, one batch of its matrices after the other.

    Args:
        group: options; `Muon` says what they mean.
        param: any strides.
        grad: not changed.
        buffer: the momentum.
    """
    if param.numel() == 0:
        return
    add_gradient(group, buffer, grad)
    for of_param, of_grad, of_buffer in batches(group, param, grad, buffer):
        update = orthogonalised(group, look_ahead(group, of_grad, of_buffer))
        decay(group, of_param, update)
        step(group, of_param, update, scale(group, *matrix_shape(of_param)))


def batches(group: dict[str, Any], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of tensors of a parameter's shape, each of matrices of one shape.

    Views have the shape (n, k, g, r, cols), see `splits.blocks`.
    """
    views = [blocks(tensor, group["split"], group["transposed"]) for tensor in tensors]
    for block in zip(*views, strict=True):
        yield from zip(*map(_batches, block), strict=True)


def matrix_shape(batch: Tensor) -> tuple[int, int]:
    """Return the rows and columns of the matrices in a batch."""
    _, _, g, r, *cols = batch.shape
    return g * r, math.prod(cols)


def add_gradient(group: dict[str, Any], buffer: Tensor, grad: Tensor) -> None:
    """Advance the momentum."""
    sign = -1 if group["maximize"] else 1
    if group["momentum_mode"] == "classical":
        buffer.mul_(group["momentum"]).add_(grad, alpha=sign)
    elif sign == 1:
        buffer.lerp_(grad, 1 - group["momentum"])
    else:  # the same bits as for -grad, without a copy of it
        buffer.neg_().lerp_(grad, 1 - group["momentum"]).neg_()


def look_ahead(group: dict[str, Any], grad: Tensor, buffer: Tensor) -> Tensor:
    """Return what is to be orthogonalised; without `nesterov` the momentum itself."""
    if not group["nesterov"]:
        return buffer
    update = -grad if group["maximize"] else grad.clone()
    if group["momentum_mode"] == "ema":
        return update.lerp_(buffer, group["momentum"])
    return update.add_(buffer, alpha=group["momentum"])


def orthogonalised(group: dict[str, Any], batch: Tensor) -> Tensor:
    """Return what Newton-Schulz makes of each matrix of a batch, in `ns_dtype`."""
    n, k, *_ = batch.shape
    matrices = batch.reshape(n * k, *matrix_shape(batch))
    return newton_schulz(
        matrices,
        schedule(group["ns_coefficients"], group["ns_steps"]),
        eps=group["ns_eps"],
        dtype=ns_dtype(group, matrices),
    ).reshape(batch.shape)


def decay(group: dict[str, Any], param: Tensor, update: Tensor) -> None:
    """Decay weights, or a part of them with its part of the update."""
    if group["weight_decay"] == 0:
        return
    factor = group["lr"] * group["weight_decay"]
    if group["cautious_weight_decay"]:
        param.sub_(param * (update * param >= 0) * factor)
    else:
        param.mul_(1 - factor)


def step(group: dict[str, Any], param: Tensor, update: Tensor, scale: float) -> None:
    """Move weights, or a part of them, against their part of the update."""
    step_size = group["lr"] * scale
    if isinstance(step_size, Tensor):
        param.sub_(update.to(step_size.dtype) * step_size)
    else:
        param.add_(update, alpha=-step_size)


def scale(group: dict[str, Any], rows: int, cols: int) -> float:
    """Return what the update of a matrix of this shape is multiplied by, beside `lr`."""
    adjust_lr_fn = group["adjust_lr_fn"]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def ns_dtype(group: dict[str, Any], matrices: Tensor) -> torch.dtype:
    """Return the dtype of Newton-Schulz's products and result."""
    name = group["ns_dtype"]
    return default_ns_dtype(matrices) if name is None else getattr(torch, name)


def _batches(block: Tensor) -> list[Tensor]:
    """Cut (n, k, ...) into pieces that are worth one batched product and bounded in memory."""
    k, limit = block.shape[1], _batch_limit(block)
    wide = min(k, limit)
    return [
        piece
        for stack in torch.split(block, max(1, limit // k) if wide == k else 1, 0)
        for piece in torch.split(stack, wide, 1)
    ]


def _batch_limit(block: Tensor) -> int:
    if block.device.type in ("cpu", "meta"):
        return 1
    return max(1, _BATCH_BYTES // (4 * math.prod(block.shape[2:])))
