"""Whether a manifest that was read can be believed: nothing leads outside, nothing is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from optstream.checkpoint.manifest import (
    Manifest,
    StoredParam,
    StoredShard,
    StoredTensor,
    StoredWindow,
)
from optstream.codecs import EXACT
from optstream.distributed.region import cover
from optstream.format import is_dense
from optstream.plan import SLICE_ALIGNMENT, stored_bytes
from optstream.units import PAGE_BYTES

WINDOW_FILE = re.compile(r"rank\d{5}/window\d{5,}\.safetensors", re.ASCII)
_MAX_BYTES = 2**62
_MAX_PIECE_BYTES = 2**30


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless files stay inside, and pieces cover tensors and lie in windows."""
    if not manifest.rank_windows or sum(manifest.rank_windows) != len(manifest.windows):
        raise ValueError(f"{len(manifest.windows)} windows are not those of the ranks")
    if not PAGE_BYTES <= manifest.piece_bytes <= _MAX_PIECE_BYTES:
        raise ValueError(f"pieces of {manifest.piece_bytes} bytes")
    for window in manifest.windows:
        _check_window(window, manifest.piece_bytes)
    for name, param in manifest.params.items():
        _check_kept(name, param)
        for key, tensor in param.tensors.items():
            _check_tensor(f"{name}/{key}", tensor, manifest.windows)
    for group in manifest.groups:
        missing = [name for name in group["params"] if name not in manifest.params]
        if missing:
            raise ValueError(f"a group names {missing[0]!r}, which is not there")


def _check_kept(name: str, param: StoredParam) -> None:
    of_tiles = param.unplanned.values() if isinstance(param.unplanned, dict) else [None]
    if not all(isinstance(values, dict) for values in (param.kept, *of_tiles)):
        raise TypeError(f"what is kept for {name} has no keys")
    if not all(isinstance(value, Tensor) for values in of_tiles for value in values.values()):
        raise TypeError(f"an unplanned state of {name} is no tensor")


def _check_window(window: StoredWindow, piece_bytes: int) -> None:
    if not window.file:
        return
    if not WINDOW_FILE.fullmatch(window.file):
        raise ValueError(f"{window.file!r} is no window's file in a checkpoint")
    sizes = (window.header_bytes, window.data_bytes, piece_bytes)
    if any(size % PAGE_BYTES or not 0 <= size <= _MAX_BYTES for size in sizes):
        raise ValueError(f"{window.file!r} has sizes of {sizes}, which are no pages")
    count = 1 + -(-window.data_bytes // piece_bytes)
    if window.header_bytes == 0 or len(window.digests) != count:
        raise ValueError(f"{window.file!r} has {len(window.digests)} digests, not {count}")


def _check_tensor(name: str, tensor: StoredTensor, windows: Sequence[StoredWindow]) -> None:
    if math.prod(max(size, 1) for size in tensor.shape) > _MAX_BYTES:
        raise ValueError(f"{name} of shape {tensor.shape} cannot be")
    if tensor.codec != EXACT and tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tensor.dtype} and stored as {tensor.codec}")
    if not cover(tensor.shape, tuple(shard.region for shard in tensor.shards)):
        raise ValueError(f"the shards of {name} do not have each of its elements once")
    for shard in tensor.shards:
        _check_pieces(name, tensor, shard, windows)
    if tensor.stride is None:
        return
    if not tensor.is_whole or not is_dense(tensor.shape, tensor.stride):
        raise ValueError(f"{name} of shape {tensor.shape} is not dense: strides {tensor.stride}")


def _check_pieces(
    name: str, tensor: StoredTensor, shard: StoredShard, windows: Sequence[StoredWindow]
) -> None:
    end, numel = 0, shard.region.numel
    for piece in shard.pieces:
        window = windows[piece.window]
        num_bytes = stored_bytes(tensor.codec, piece.numel, tensor.dtype)
        alignment = PAGE_BYTES if len(shard.pieces) > 1 else tensor.dtype.itemsize
        fits = piece.offset + num_bytes <= window.data_bytes and window.file
        if piece.start != end or not fits or piece.offset % alignment:
            raise ValueError(f"a piece of {name} is misplaced")
        end += piece.numel
        unit = num_bytes % PAGE_BYTES if tensor.codec == EXACT else piece.numel % SLICE_ALIGNMENT
        if end < numel and unit:
            raise ValueError(f"a piece of {name} ends inside a page or a block")
    if end != numel:
        raise ValueError(f"the pieces of {name} hold {end} elements")
