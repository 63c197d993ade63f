"""Muon's rule for a matrix that lies on several ranks (DTensor).

Momentum, decay and step are elementwise: each rank does its part. The update is brought together at
an owner, orthogonalised there by the code that plain tensors use, and its parts go back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optstream.distributed.ownership import Cost
from optstream.distributed.parts import Parts, parts_of
from optstream.distributed.shards import here, is_sharded, mesh_of
from optstream.muon.splits import block_shapes, blocks
from optstream.muon.update import (
    add_gradient,
    batches,
    decay,
    look_ahead,
    muon_flops,
    ns_dtype,
    orthogonalised,
    scale,
    step,
)


def is_scattered(group: dict[str, Any], param: Tensor) -> bool:
    """Tell whether a parameter's matrices lie on several ranks each.

    A stack of experts that is cut between experts leaves every matrix whole.
    """
    if not (group["use_muon"] and is_sharded(param)):
        return False
    dims = {
        getattr(placement, "dim", None)
        for mesh_dim, placement in enumerate(param.placements)  # type: ignore[attr-defined]
        if not placement.is_replicate() and mesh_of(param).size(mesh_dim) > 1
    }
    return not (_is_stack(group) and dims == {0})


def wholes_at_once(group: dict[str, Any], param: Tensor) -> int:
    """Return how many times the largest part an owner puts together at once; 0: it need not.

    Members of a stack are shared out, so that each rank has at most as much as its own part.
    """
    if not is_scattered(group, param):
        return 0
    return 1 if _is_stack(group) else len(parts_of("a parameter", param).ranks)


def scattered(
    group: dict[str, Any], param: Tensor, grad: Tensor, buffer: Tensor
) -> Iterator[Scattered]:
    """Yield the tasks that update such a parameter, for every owner one where it is a stack."""
    stack = _is_stack(group)
    parts = parts_of("a parameter", param, stack=stack)
    tensors = here(param), here(grad), here(buffer)
    if not stack:
        yield Scattered(group, parts, *tensors)
        return
    count = parts.shape[0]
    share = -(-count // len(parts.ranks))
    for start in range(0, count, max(1, share)):
        some = slice(start, min(start + share, count))
        part, its_grad, its_buffer = (tensor[some] for tensor in tensors)
        yield Scattered(group, parts.of_stack(len(part)), part, its_grad, its_buffer)


def _is_stack(group: dict[str, Any]) -> bool:
    return bool(group["split"]) and group["split"][0] == "stack"


class Scattered:
    """One such parameter in one step, or some members of a stack; a `gathering.Task`.

    Attributes:
        parts: where its parts are.
        cost: of orthogonalising it.
        device: of this rank's part.
        result_dtype: that of Newton-Schulz.
    """

    def __init__(
        self, group: dict[str, Any], parts: Parts, param: Tensor, grad: Tensor, buffer: Tensor
    ) -> None:
        """Take this rank's parts."""
        self.parts = parts
        self._group = group
        self._param, self._grad, self._buffer = param, grad, buffer
        self.cost = _cost(parts.shape, _options(group, _OF_COST))
        self.device = param.device
        self.result_dtype = ns_dtype(group, param)

    def begin(self) -> Tensor:
        add_gradient(self._group, self._buffer, self._grad)
        return look_ahead(self._group, self._grad, self._buffer)

    def compute(self, whole: Tensor) -> Tensor:
        result = whole
        if whole.dtype != self.result_dtype:
            result = torch.empty_like(whole, dtype=self.result_dtype)
        for update, place in batches(self._group, whole, result):
            # strides as `look_ahead` leaves them: the order of sums in a product depends on them
            laid_out = update.clone() if self._group["nesterov"] else update
            place.copy_(orthogonalised(self._group, laid_out))
        return result

    def end(self, result: Tensor) -> None:
        decay(self._group, self._param, result)
        dim = _row_dim(self._group, result.dim())
        first, num = self.parts.box.offset[dim], self.parts.box.shape[dim]
        for start, stop, factor in _scales(self.parts.shape, _options(self._group, _OF_SCALE)):
            rows = range(max(start - first, 0), min(stop - first, num))
            if rows:
                mine, its = (t.narrow(dim, rows.start, len(rows)) for t in (self._param, result))
                step(self._group, mine, its, factor)


_Options = tuple[tuple[str, Any], ...]
_OF_COST = ("use_muon", "split", "transposed", "ns_coefficients", "ns_steps", "ns_dtype")
_OF_SCALE = ("split", "transposed", "adjust_lr_fn")


def _options(group: dict[str, Any], names: tuple[str, ...]) -> _Options:
    return tuple((name, group[name]) for name in names)


@cache
def _cost(shape: tuple[int, ...], options: _Options) -> Cost:
    return Cost(muon_flops(shape, dict(options)), math.prod(shape))


@cache
def _scales(shape: tuple[int, ...], options: _Options) -> tuple[tuple[int, int, float], ...]:
    """Return runs of rows whose matrices have one scale: start, stop, scale."""
    group = dict(options)
    dim = _row_dim(group, len(shape))
    thin = [1] * len(shape)
    thin[dim] = shape[dim]
    factors = torch.empty(thin, dtype=torch.float64)
    matrices = block_shapes(shape, group["split"], group["transposed"])
    views = blocks(factors, group["split"], group["transposed"])
    for view, (_, rows, cols) in zip(views, matrices, strict=True):
        view.fill_(scale(group, rows, cols))
    values, counts = torch.unique_consecutive(factors, return_counts=True)
    stops = counts.cumsum(0).tolist()
    return tuple(zip([0, *stops], stops, values.tolist(), strict=False))


def _row_dim(group: dict[str, Any], num_dims: int) -> int:
    """Return the dimension of a parameter in which its matrices' rows follow each other."""
    if group["split"] == ("flatten",):
        return 0
    return num_dims - 1 if group["transposed"] else num_dims - 2
