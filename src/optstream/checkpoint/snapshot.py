"""A snapshot: an immutable version of every window and of what was in memory beside them.

A checkpoint is a snapshot with names on a filesystem; a `state_dict` is a snapshot's tensors,
mapped from its files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optstream.checkpoint.manifest import Manifest, StoredParam, StoredTensor
from optstream.checkpoint.mapping import FileRange
from optstream.checkpoint.mapping import Mapping as FileMapping
from optstream.store.base import FrozenFile


class Snapshot:
    """Windows that never change again.

    Attributes:
        manifest: what is where.
        files: by window; one that was never written has none.
        directory: where the files have their names; None for a live optimizer's.
    """

    def __init__(
        self, manifest: Manifest, files: Mapping[int, FrozenFile], directory: Path | None
    ) -> None:
        self.manifest = manifest
        self.files = dict(files)
        self.directory = directory
        self._mapped: dict[int, FileMapping] = {}

    def state(self, name: str) -> dict[str, Any]:
        """Return a parameter's state as its optimizer keeps it; tensors are mapped, not read.

        Counters and Python values are the snapshot's own: copy them before changing them.
        """
        param = self.manifest.params[name]
        tensors = {key: self.tensor(tensor) for key, tensor in param.tensors.items()}
        return {**param.kept, **tensors, **_unplanned(param)}

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return one state tensor, mapped: it is read when it is looked at."""
        flat = self._flat(stored)
        if stored.stride is None:
            return flat.view(stored.shape)
        return flat.as_strided(stored.shape, stored.stride)

    def _flat(self, stored: StoredTensor) -> Tensor:
        if stored.num_bytes == 0:
            return torch.empty(0, dtype=stored.dtype)
        if len(stored.pieces) == 1:
            [piece] = stored.pieces
            offset = self.files[piece.window].header_bytes + piece.offset
            return self._mapping(piece.window).tensor(offset, stored.num_bytes, stored.dtype)
        ranges = [
            FileRange(
                self.files[piece.window],
                self.files[piece.window].header_bytes + piece.offset,
                piece.numel * stored.dtype.itemsize,
            )
            for piece in stored.pieces
        ]
        return FileMapping(ranges).tensor(0, stored.num_bytes, stored.dtype)

    def _mapping(self, window: int) -> FileMapping:
        """Return one mapping of a whole file: maps are limited, small tensors many."""
        if window not in self._mapped:
            file = self.files[window]
            self._mapped[window] = FileMapping([FileRange(file, 0, file.file_bytes)])
        return self._mapped[window]

    @property
    def file_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files.values())

    @property
    def state_bytes(self) -> int:
        return sum(
            tensor.num_bytes
            for param in self.manifest.params.values()
            for tensor in param.tensors.values()
        )


def _unplanned(param: StoredParam) -> dict[str, Tensor]:
    """Return tensors that were in memory, tile by tile, as whole ones."""
    tiles: dict[str, list[Tensor]] = {}
    for start in sorted(param.unplanned):
        for key, tile in param.unplanned[start].items():
            tiles.setdefault(key, []).append(tile)
    whole = {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in tiles.items()}
    numel = math.prod(param.shape)
    return {key: t.view(param.shape) if t.numel() == numel else t for key, t in whole.items()}
