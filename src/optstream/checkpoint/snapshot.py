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

from optstream.checkpoint.decoding import decode, is_of
from optstream.checkpoint.manifest import Manifest, StoredParam, StoredPiece, StoredTensor
from optstream.checkpoint.mapping import FileRange
from optstream.checkpoint.mapping import Mapping as FileMapping
from optstream.codecs import EXACT, SPLIT
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

    def state(self, name: str, weight: Tensor | None, folder: Path) -> dict[str, Any]:
        """Return a parameter's state as its optimizer keeps it; tensors are mapped, not read.

        What is encoded is decoded into nameless files. Counters and Python values are the
        snapshot's own: copy them before changing them.

        Args:
            weight: the parameter itself, which split masters need; None leaves those out.
            folder: on a drive, for decoded values.

        Raises:
            OutOfSpaceError: no room for decoded values.
        """
        param = self.manifest.params[name]
        tensors = {
            key: self._tensor(tensor, weight, folder)
            for key, tensor in param.tensors.items()
            if tensor.codec != SPLIT or weight is not None
        }
        return {**param.kept, **tensors, **_unplanned(param)}

    def tensor(self, name: str, key: str, weight: Tensor | None, folder: Path) -> Tensor:
        """Return one tensor of a parameter's state, see `state`."""
        param = self.manifest.params[name]
        if key in param.tensors:
            return self._tensor(param.tensors[key], weight, folder)
        kept: Tensor = {**param.kept, **_unplanned(param)}[key]
        return kept

    def outline(self, name: str) -> dict[str, Any]:
        """Return a parameter's state with tensors of the meta device in place of encoded ones."""
        param = self.manifest.params[name]
        tensors = {
            key: self._tensor(tensor, None, Path())
            if tensor.codec == EXACT
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in param.tensors.items()
        }
        return {**param.kept, **tensors, **_unplanned(param)}

    def is_of(self, name: str, weight: Tensor) -> bool:
        """Tell whether a parameter is the one, as it is now, that its split master belongs to."""
        tensors = self.manifest.params[name].tensors.values()
        split = [tensor for tensor in tensors if tensor.codec == SPLIT]
        return all(is_of(tensor, self._bytes, weight) for tensor in split)

    def _tensor(self, stored: StoredTensor, weight: Tensor | None, folder: Path) -> Tensor:
        if stored.codec == EXACT:
            flat = self._flat(stored)
        else:
            flat = decode(stored, self._bytes, weight, folder)
        if stored.stride is None:
            return flat.view(stored.shape)
        return flat.as_strided(stored.shape, stored.stride)

    def _bytes(self, piece: StoredPiece, num_bytes: int) -> Tensor:
        offset = self.files[piece.window].header_bytes + piece.offset
        return self._mapping(piece.window).tensor(offset, num_bytes, torch.uint8)

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
        """Return the bytes of state in the files, encoded where it is."""
        return sum(
            tensor.stored_bytes
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
