"""Muon's rule for one parameter: momentum, Newton-Schulz on each of its matrices, decay, step."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    dtype = _ns_dtype(group, torch.empty(0, device=device))
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
    _add_gradient(group, buffer, grad)
    views = [blocks(t, group["split"], group["transposed"]) for t in (param, grad, buffer)]
    for param_block, grad_block, buffer_block in zip(*views, strict=True):
        chunks = [_batches(block) for block in (param_block, grad_block, buffer_block)]
        for batch in zip(*chunks, strict=True):
            _update_batch(group, *batch)


def _add_gradient(group: dict[str, Any], buffer: Tensor, grad: Tensor) -> None:
    sign = -1 if group["maximize"] else 1
    if group["momentum_mode"] == "classical":
        buffer.mul_(group["momentum"]).add_(grad, alpha=sign)
    elif sign == 1:
        buffer.lerp_(grad, 1 - group["momentum"])
    else:  # the same bits as for -grad, without a copy of it
        buffer.neg_().lerp_(grad, 1 - group["momentum"]).neg_()


def _update_batch(group: dict[str, Any], param: Tensor, grad: Tensor, buffer: Tensor) -> None:
    """Update matrices of one shape; views of shape (n, k, g, r, cols)."""
    update = _look_ahead(group, grad, buffer) if group["nesterov"] else buffer
    n, k, g, r, *cols = param.shape
    matrices = update.reshape(n * k, g * r, math.prod(cols))
    update = newton_schulz(
        matrices,
        schedule(group["ns_coefficients"], group["ns_steps"]),
        eps=group["ns_eps"],
        dtype=_ns_dtype(group, matrices),
    ).reshape(param.shape)
    _decay(group, param, update)
    step_size = group["lr"] * _scale(group["adjust_lr_fn"], g * r, math.prod(cols))
    if isinstance(step_size, Tensor):
        param.sub_(update.to(step_size.dtype) * step_size)
    else:
        param.add_(update, alpha=-step_size)


def _look_ahead(group: dict[str, Any], grad: Tensor, buffer: Tensor) -> Tensor:
    update = -grad if group["maximize"] else grad.clone()
    if group["momentum_mode"] == "ema":
        return update.lerp_(buffer, group["momentum"])
    return update.add_(buffer, alpha=group["momentum"])


def _decay(group: dict[str, Any], param: Tensor, update: Tensor) -> None:
    if group["weight_decay"] == 0:
        return
    factor = group["lr"] * group["weight_decay"]
    if group["cautious_weight_decay"]:
        param.sub_(param * (update * param >= 0) * factor)
    else:
        param.mul_(1 - factor)


def _scale(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def _ns_dtype(group: dict[str, Any], matrices: Tensor) -> torch.dtype:
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
