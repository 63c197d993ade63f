"""The manifest of one checkpoint, from those of the ranks that each hold a part of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optstream.checkpoint.manifest import Manifest, StoredParam, StoredTensor


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest of all ranks' windows, those of rank 0 first.

    Args:
        manifests: by rank; each has all parameters, and the state of those it keeps.
    """
    params: dict[str, StoredParam] = {}
    first = 0
    for manifest in manifests:
        for name, param in manifest.params.items():
            if name not in params or param.tensors or param.kept or param.unplanned:
                params[name] = _moved(param, first)
        first += len(manifest.windows)
    return replace(
        manifests[0],
        rank_windows=tuple(len(manifest.windows) for manifest in manifests),
        params=params,
        windows=tuple(window for manifest in manifests for window in manifest.windows),
    )


def _moved(param: StoredParam, first: int) -> StoredParam:
    """Return a parameter whose rank's windows are numbered from `first` on."""
    tensors = {key: _moved_tensor(tensor, first) for key, tensor in param.tensors.items()}
    return replace(param, tensors=tensors)


def _moved_tensor(tensor: StoredTensor, first: int) -> StoredTensor:
    pieces = tuple(replace(piece, window=first + piece.window) for piece in tensor.pieces)
    return replace(tensor, pieces=pieces)
