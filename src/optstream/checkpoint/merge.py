"""The manifest of one checkpoint, from those of the ranks that each hold a part of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optstream.checkpoint.manifest import Manifest, StoredParam, StoredTensor, StoredWindow
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
    params: dict[str, StoredParam] = {}
    first = 0
    for rank, manifest in enumerate(manifests):
        for name, param in manifest.params.items():
            moved = _moved(param, first)
            if not _has_state(param):
                params.setdefault(name, moved)
            elif name in params and _has_state(params[name]):
                params[name] = _joined(name, params[name], moved, rank)
            else:
                params[name] = moved
        first += len(manifest.windows)
    params = {name: _complete(name, param) for name, param in params.items()}
    return replace(
        manifests[0],
        rank_windows=tuple(len(manifest.windows) for manifest in manifests),
        params=params,
        windows=_used(params, [window for each in manifests for window in each.windows]),
    )


def _has_state(param: StoredParam) -> bool:
    return bool(param.tensors or param.kept or param.unplanned)


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


def _joined(name: str, param: StoredParam, more: StoredParam, rank: int) -> StoredParam:
    """Return a parameter of which another rank has more shards, or the same ones."""
    for what, here, there in (
        ("counters and values", encode(param.kept, name), encode(more.kept, name)),
        ("states", sorted(param.tensors), sorted(more.tensors)),
    ):
        if here != there:
            raise CheckpointError(
                f"the shards of {name} have other {what} on rank {rank} than on the ranks before "
                f"it ({there} and {here}), so they are not of one state; load a checkpoint on all "
                "ranks, and step on all"
            )
    return replace(
        param, tensors={key: _with(of, more.tensors[key]) for key, of in param.tensors.items()}
    )


def _with(tensor: StoredTensor, more: StoredTensor) -> StoredTensor:
    known = {shard.region for shard in tensor.shards}
    new = tuple(shard for shard in more.shards if shard.region not in known)
    return replace(tensor, shards=tensor.shards + new)


def _complete(name: str, param: StoredParam) -> StoredParam:
    tensors = {key: _filled(tensor) for key, tensor in param.tensors.items()}
    for key, tensor in tensors.items():
        if not cover(tensor.shape, [shard.region for shard in tensor.shards]):
            raise CheckpointError(
                f"{name}/{key} has {tensor.numel} elements, and the shards of these "
                f"ranks do not make them up; process_group= must have all ranks of its mesh"
            )
    return replace(param, tensors=tensors)


def _filled(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor without shards that hold nothing."""
    if tensor.numel == 0:
        return replace(
            tensor, shards=(replace(tensor.shards[0], region=Region.whole(tensor.shape)),)
        )
    return replace(tensor, shards=tuple(shard for shard in tensor.shards if shard.region.numel))


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
