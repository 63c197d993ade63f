"""What a snapshot holds, by parameter name, and where each piece lies; see manifest_json.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from optstream.codecs import EXACT
from optstream.distributed.region import Region
from optstream.plan import stored_bytes

VERSION = 3
"""3: some tensors are stored in shards. 2: some have a codec. Else a manifest is of version 1."""


@dataclass(frozen=True)
class StoredPiece:
    """Where a flat range of a shard lies: bytes from `offset` of a window's data."""

    window: int
    offset: int
    start: int
    numel: int


@dataclass(frozen=True)
class StoredShard:
    """The elements of a tensor that one rank stored, put together.

    Attributes:
        pieces: in order, covering every element once.
    """

    region: Region
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One state tensor of a parameter.

    Attributes:
        shape, stride: elements; stride is None where the order is row-major, as in all shards.
        shards: in the order of the ranks, covering every element once; a single one that is all
            where the tensor is not sharded.
        codec: the name of how they are stored.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    shards: tuple[StoredShard, ...]
    codec: str = EXACT

    @property
    def is_whole(self) -> bool:
        """Tell whether one rank stored all of it."""
        return len(self.shards) == 1 and self.shards[0].region == Region.whole(self.shape)

    @property
    def pieces(self) -> Iterator[StoredPiece]:
        """Yield the pieces of all shards."""
        return (piece for shard in self.shards for piece in shard.pieces)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its values; `stored_bytes` are those in windows."""
        return self.numel * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return sum(stored_bytes(self.codec, piece.numel, self.dtype) for piece in self.pieces)


@dataclass(frozen=True)
class StoredParam:
    """A parameter's whole state: tensors in windows, and what was in memory.

    Attributes:
        kept: counters and Python values by key.
        unplanned: tensors the plan did not foresee, by the start of their tile, then by key.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: dict[str, StoredTensor]
    kept: dict[str, Any] = field(default_factory=dict)
    unplanned: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredWindow:
    """A window's file; `file` is relative to the checkpoint, "" for a window never written.

    Attributes:
        digests: xxh3 (64 bit) of the header, then of each `piece_bytes` of the data.
    """

    file: str
    header_bytes: int
    data_bytes: int
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a snapshot but the windows' bytes.

    Attributes:
        optimizer: the wrapped optimizer's class, with its module.
        step: steps taken since the state was new.
        rank_windows: how many of the windows each rank had; they stand in the order of the ranks.
        groups: param_groups; "params" are names.
    """

    optimizer: str
    step: int
    rank_windows: tuple[int, ...]
    piece_bytes: int
    groups: tuple[dict[str, Any], ...]
    params: dict[str, StoredParam]
    windows: tuple[StoredWindow, ...]

    @property
    def world_size(self) -> int:
        """Return how many ranks had a part of the state."""
        return len(self.rank_windows)

    def windows_of(self, rank: int) -> range:
        """Return the indices of a rank's windows."""
        first = sum(self.rank_windows[:rank])
        return range(first, first + self.rank_windows[rank])

    @property
    def version(self) -> int:
        """Return the first version of the format that holds all that is in it."""
        tensors = [tensor for param in self.params.values() for tensor in param.tensors.values()]
        if not all(tensor.is_whole for tensor in tensors):
            return 3
        return 2 if any(tensor.codec != EXACT for tensor in tensors) else 1
