"""The manifest of one checkpoint, from those of the ranks that each hold a part of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optstream.checkpoint.manifest import (
    Manifest,
    StoredParam,
    StoredShard,
    StoredTensor,
    StoredWindow,
)
from optstream.checkpoint.values import encode
from optstream.distributed.region import Region, cover
from optstream.errors import CheckpointError


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest of all ranks' windows, those of rank 0 first.

    Of shards that several ranks have (replicas) it has the first rank's. A window that nothing of
    what it has lies in is in no file.

    Args:
        manifests: by rank; each has all parameters, and the state of those, or of the shards, it
            keeps.

    Raises:
        CheckpointError: shards that are not of one state, or that miss a part of it.
    """
    found: dict[str, list[tuple[int, StoredParam]]] = {}
    first = 0
    for rank, manifest in enumerate(manifests):
        for name, param in manifest.params.items():
            of_ranks = found.setdefault(name, [])
            if param.tensors or param.kept or param.unplanned:
                of_ranks.append((rank, _moved(param, first)))
        first += len(manifest.windows)
    params = {
        name: _joined(name, of_ranks) if of_ranks else manifests[0].params[name]
        for name, of_ranks in found.items()
    }
    return replace(
        manifests[0],
        rank_windows=tuple(len(manifest.windows) for manifest in manifests),
        params=params,
        windows=_used(params, [window for each in manifests for window in each.windows]),
    )


def _moved(param: StoredParam, first: int) -> StoredParam:
    """Return a parameter whose rank's windows are numbered from `first` on."""
    tensors = {key: _moved_tensor(tensor, first) for key, tensor in param.tensors.items()}
    return replace(param, tensors=tensors)


def _moved_tensor(tensor: StoredTensor, first: int) -> StoredTensor:
    shards = tuple(
        replace(
            shard,
            pieces=tuple(replace(piece, window=first + piece.window) for piece in shard.pieces),
        )
        for shard in tensor.shards
    )
    return replace(tensor, shards=shards)


def _joined(name: str, of_ranks: Sequence[tuple[int, StoredParam]]) -> StoredParam:
    """Return a parameter whose state one rank has, or several in shards."""
    first_rank, first = of_ranks[0]
    for rank, param in of_ranks[1:]:
        for what, here, there in (
            ("counters and values", encode(first.kept, name), encode(param.kept, name)),
            ("states", sorted(first.tensors), sorted(param.tensors)),
        ):
            if here != there:
                raise CheckpointError(
                    f"the shards of {name} have other {what} on rank {rank} than on rank "
                    f"{first_rank} ({there} and {here}), so they are not of one state; step, and "
                    "load checkpoints, on all ranks together"
                )
    params = [param for _, param in of_ranks]
    tensors = {key: _whole(name, key, [p.tensors[key] for p in params]) for key in first.tensors}
    return replace(first, tensors=tensors)


def _whole(name: str, key: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return a tensor with the shards of all ranks but those that hold nothing, or a copy."""
    first = parts[0]
    if first.numel == 0:
        return replace(first, shards=(replace(first.shards[0], region=Region.whole(first.shape)),))
    shards: dict[Region, StoredShard] = {}
    for shard in (shard for part in parts for shard in part.shards):
        if shard.region.numel:
            shards.setdefault(shard.region, shard)
    if not cover(first.shape, tuple(shards)):
        raise CheckpointError(
            f"the shards of {name}/{key} on these ranks are not all of it (shape {first.shape}); "
            "process_group= must have all ranks of its mesh"
        )
    return replace(first, shards=tuple(shards.values()))


def _used(
    params: dict[str, StoredParam], windows: Sequence[StoredWindow]
) -> tuple[StoredWindow, ...]:
    used = {
        piece.window
        for param in params.values()
        for tensor in param.tensors.values()
        for piece in tensor.pieces
    }
    return tuple(
        window if index in used else replace(window, file="", header_bytes=0, digests=())
        for index, window in enumerate(windows)
    )
