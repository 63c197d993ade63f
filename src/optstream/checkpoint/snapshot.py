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

from optstream.checkpoint.decoding import decode, is_of, on_drive
from optstream.checkpoint.manifest import (
    Manifest,
    StoredParam,
    StoredPiece,
    StoredShard,
    StoredTensor,
)
from optstream.checkpoint.mapping import FileRange
from optstream.checkpoint.mapping import Mapping as FileMapping
from optstream.checkpoint.parts import Assembled, Held, Source
from optstream.codecs import EXACT, SPLIT
from optstream.distributed.region import Region
from optstream.store.base import FrozenFile

_COPIED_AT_ONCE = 2**21
"""Elements."""


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

    def state(
        self, name: str, weight: Held | None, folder: Path, region: Region | None = None
    ) -> dict[str, Any]:
        """Return a parameter's state as its optimizer keeps it; tensors are mapped, not read.

        What is encoded is decoded into nameless files. Counters and Python values are the
        snapshot's own: copy them before changing them.

        Args:
            weight: the parameter itself, which split masters need; None leaves those out.
            folder: on a drive, for decoded values.
            region: what of tensors of the parameter's shape is wanted; None: all, as a tensor.
                Where no shard is just that it is an Assembled.

        Raises:
            OutOfSpaceError: no room for decoded values.
        """
        param = self.manifest.params[name]
        tensors = {
            key: self._values(tensor, weight, folder)
            if region is None or tensor.shape != param.shape
            else self._part(tensor, region, weight, folder)
            for key, tensor in param.tensors.items()
            if tensor.codec != SPLIT or weight is not None
        }
        return {**param.kept, **tensors, **_unplanned(param)}

    def tensor(self, name: str, key: str, folder: Path) -> Tensor:
        """Return one whole tensor of a parameter's state, see `state`."""
        param = self.manifest.params[name]
        if key in param.tensors:
            return self._values(param.tensors[key], None, folder)
        kept: Tensor = {**param.kept, **_unplanned(param)}[key]
        return kept

    def outline(self, name: str) -> dict[str, Any]:
        """Return a parameter's state with tensors of the meta device in place of stored ones."""
        param = self.manifest.params[name]
        tensors = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in param.tensors.items()
        }
        return {**param.kept, **tensors, **_unplanned(param)}

    def is_of(self, name: str, weight: Held) -> bool:
        """Tell whether a parameter is the one, as it is now, that its split master belongs to."""
        tensors = self.manifest.params[name].tensors.values()
        return all(
            is_of(tensor, shard, self._bytes, weight)
            for tensor in tensors
            if tensor.codec == SPLIT
            for shard in tensor.shards
            if shard.region.meets(weight.region)
        )

    def _values(self, stored: StoredTensor, weight: Held | None, folder: Path) -> Tensor:
        """Return all of a tensor."""
        part = self._part(stored, Region.whole(stored.shape), weight, folder)
        if isinstance(part, Tensor):
            return part
        flat = on_drive(stored.numel, stored.dtype, folder)
        for start in range(0, stored.numel, _COPIED_AT_ONCE):
            stop = min(start + _COPIED_AT_ONCE, stored.numel)
            part.part(start, stop, out=flat[start:stop])
        return flat.view(stored.shape)

    def _part(
        self, stored: StoredTensor, region: Region, weight: Held | None, folder: Path
    ) -> Tensor | Assembled:
        met = [shard for shard in stored.shards if shard.region == region]
        met = met or [shard for shard in stored.shards if shard.region.meets(region)]
        sources = [self._source(stored, shard, weight, folder) for shard in met]
        if met and met[0].region == region:
            return sources[0].open()
        return Assembled(region, stored.dtype, sources)

    def _source(
        self, stored: StoredTensor, shard: StoredShard, weight: Held | None, folder: Path
    ) -> Source:
        if stored.codec == EXACT:
            return Source(shard.region, lambda: _shaped(self._flat(stored, shard), stored, shard))
        # at once: the weight is here for a moment only
        values = _shaped(decode(stored, shard, self._bytes, weight, folder), stored, shard)
        return Source(shard.region, lambda: values)

    def _bytes(self, piece: StoredPiece, num_bytes: int) -> Tensor:
        offset = self.files[piece.window].header_bytes + piece.offset
        return self._mapping(piece.window).tensor(offset, num_bytes, torch.uint8)

    def _flat(self, stored: StoredTensor, shard: StoredShard) -> Tensor:
        num_bytes = shard.region.numel * stored.dtype.itemsize
        if num_bytes == 0:
            return torch.empty(0, dtype=stored.dtype)
        if len(shard.pieces) == 1:
            [piece] = shard.pieces
            offset = self.files[piece.window].header_bytes + piece.offset
            return self._mapping(piece.window).tensor(offset, num_bytes, stored.dtype)
        ranges = [
            FileRange(
                self.files[piece.window],
                self.files[piece.window].header_bytes + piece.offset,
                piece.numel * stored.dtype.itemsize,
            )
            for piece in shard.pieces
        ]
        return FileMapping(ranges).tensor(0, num_bytes, stored.dtype)

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


def _shaped(flat: Tensor, stored: StoredTensor, shard: StoredShard) -> Tensor:
    if stored.stride is None:
        return flat.view(shard.region.shape)
    return flat.as_strided(stored.shape, stored.stride)


def _unplanned(param: StoredParam) -> dict[str, Tensor]:
    """Return tensors that were in memory, tile by tile, as whole ones."""
    tiles: dict[str, list[Tensor]] = {}
    for start in sorted(param.unplanned):
        for key, tile in param.unplanned[start].items():
            tiles.setdefault(key, []).append(tile)
    whole = {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in tiles.items()}
    numel = math.prod(param.shape)
    return {key: t.view(param.shape) if t.numel() == numel else t for key, t in whole.items()}
