"""Gradients of parameters whose state is shared by ranks: average them, clip them by their norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optstream.distributed.exchange import UnderWay, flat, is_dense, pack, parcels, unpack
from optstream.distributed.ranks import Ranks
from optstream.distributed.shards import check_shard_gradient, here, shard_norms
from optstream.distributed.shares import EVERY_RANK, Shares
from optstream.optimizer import StreamedOptimizer

Params = dict[int, Tensor]
"""By index in `Shares.places`, in the order of the groups."""


@torch.no_grad()
def reduce_to_owner(optimizer: StreamedOptimizer) -> None:
    """Average every gradient over the ranks, where its parameter is kept; elsewhere it is freed.

    Call it on all ranks after the last backward of a step, before clipping and `step()`, in place
    of DistributedDataParallel, which brings the averages to every rank and so moves twice the
    bytes. A gradient that some ranks lack counts as zeros there; one that all lack stays None.

    The sum is that of DistributedDataParallel bit for bit on two ranks, and within rounding on
    more, where the order of adding differs.

    Raises:
        RankError: another rank failed.
    """
    state = optimizer._state
    ranks = state.ranks
    if ranks.size == 1:
        return
    with ranks.together():
        state.extend()
        shares = state.roster.shares
        params = _params(optimizer, shares)
        has_gradient = ranks.gather(bytes(p.grad is not None for p in params.values()))
        present = [any(flags) for flags in zip(*has_gradient, strict=True)]
        reduced = {
            index: param
            for (index, param), is_present in zip(params.items(), present, strict=True)
            if is_present
        }
        under_way = UnderWay(ranks)
        for owner in range(ranks.size):
            theirs = [param for index, param in reduced.items() if shares.owners[index] == owner]
            _reduce(ranks, owner, theirs, under_way)
        under_way.wait()


def _reduce(ranks: Ranks, owner: int, params: Sequence[Tensor], under_way: UnderWay) -> None:
    """Start reducing gradients to their owner."""
    left = iter(params)
    for parcel in parcels(_shares_of(params, ranks.size)):
        sent = [next(left) for _ in parcel]
        packed = pack(parcel)

        def settle(
            sent: Sequence[Tensor] = sent, packed: Tensor = packed, parcel: list[Tensor] = parcel
        ) -> None:
            if ranks.rank != owner:
                for param in sent:
                    param.grad = None
            elif packed is not parcel[0]:
                unpack(packed, parcel)

        under_way.add(ranks.reduce(packed, owner), settle)


def _shares_of(params: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield this rank's part of each average, as flat tensors laid out alike on all ranks."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif param.grad.stride() != param.stride() or not is_dense(param.grad):
            param.grad = torch.empty_like(param).copy_(param.grad)
        yield flat(param.grad).mul_(1 / size)  # as DistributedDataParallel: first divide, then add


@torch.no_grad()
def clip_grad_norm_(
    optimizer: StreamedOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; return the norm before.

    The norm is that of all parameters of the optimizer, whichever rank has their gradients: of
    every parameter the rank that keeps it gives the norm, of a sharded one all that have a part. It
    is what `torch.nn.utils.clip_grad_norm_` returns in a single process for the parameters in the
    order of the groups, bit for bit on a CPU (tests/distributed/test_gradients.py), and within
    rounding where parameters are sharded (tests/distributed/test_shards.py).

    Args:
        max_norm, norm_type, error_if_nonfinite: as in torch.

    Raises:
        ConfigError: `norm_type` is not positive and a parameter is sharded.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
        RankError: another rank failed.
    """
    state = optimizer._state
    with state.ranks.together():
        state.extend()
        params = _params(optimizer, state.roster.shares)
        for index, param in params.items():
            if param.grad is not None:
                name = state.roster.name(*state.roster.shares.places[index])
                check_shard_gradient(name, param, param.grad)
        norms = _norms(state.ranks, state.roster.shares, params, float(norm_type))
    held = [_with_gradient(param) for param in params.values() if param.grad is not None]
    if not norms:
        return torch.tensor(0.0)
    total = _norm(torch.stack(norms), float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped; use error_if_nonfinite=False to scale them all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total


def _with_gradient(param: Tensor) -> Tensor:
    """Return what has the gradient as a plain tensor: torch scales no mixture with DTensors."""
    assert param.grad is not None
    part = here(param.grad)
    if part is param.grad:
        return param
    holder = part.detach()
    holder.grad = part
    return holder


def _norms(ranks: Ranks, shares: Shares, params: Params, norm_type: float) -> list[Tensor]:
    """Return the norm of each gradient that there is, in order, the same on all ranks."""
    # one row a parameter: its norm, and whether there is one; the other ranks' zeros add nothing
    table = torch.zeros(len(params), 2, dtype=torch.float64)
    mine = [
        (row, here(param.grad))
        for row, (index, param) in enumerate(params.items())
        if shares.owners[index] == ranks.rank and param.grad is not None
    ]
    if mine:
        found = torch.stack([_norm(grad, norm_type).double() for _, grad in mine])
        rows = [row for row, _ in mine]
        table[rows] = torch.stack([found.cpu(), torch.ones(len(mine), dtype=torch.float64)], dim=1)
    sharded = [
        (row, param)
        for row, (index, param) in enumerate(params.items())
        if shares.owners[index] == EVERY_RANK
    ]
    for row, found_there in shard_norms(sharded, norm_type):
        if ranks.rank == 0:  # all ranks have them
            table[row] = found_there
    ranks.add_up(table)
    device = next((param.device for param in params.values()), None)
    return [
        norm.to(device, param.dtype)
        for (norm, there), param in zip(table, params.values(), strict=True)
        if there
    ]


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    if not grad.numel():
        return grad.new_zeros(())  # torch knows no largest element of nothing
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type)
    return norm


def _params(optimizer: StreamedOptimizer, shares: Shares) -> Params:
    groups = optimizer.param_groups
    indices = sorted(range(len(shares.places)), key=lambda index: shares.places[index])
    places = {index: shares.places[index] for index in indices}
    return {index: groups[g]["params"][position] for index, (g, position) in places.items()}
