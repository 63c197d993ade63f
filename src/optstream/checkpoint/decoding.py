"""Encoded tensors of a snapshot as values, in files of their own: memory stays bounded."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from optstream.checkpoint.manifest import StoredPiece, StoredShard, StoredTensor
from optstream.checkpoint.parts import Held
from optstream.codecs import (
    CODECS,
    Coder,
    Encoded,
    Place,
    fits_parameter,
    in_memory_order,
)
from optstream.errors import OutOfSpaceError, StoreError
from optstream.units import PAGE_BYTES, format_bytes

Bytes = Callable[[StoredPiece, int], Tensor]
"""Gives so many bytes from where a piece lies, as uint8."""

CPU = torch.device("cpu")


def decode(
    stored: StoredTensor, shard: StoredShard, bytes_of: Bytes, weight: Held | None, folder: Path
) -> Tensor:
    """Return a shard's values, flat, in the order of memory.

    Args:
        weight: what split masters belong to.
        folder: on a drive; the values are in a nameless file there.

    Raises:
        OutOfSpaceError: no room for them.
    """
    flat = on_drive(shard.region.numel, stored.dtype, folder)
    coder = Coder(CPU)
    rounded = None if weight is None else _rounded(stored, shard, weight)
    for piece, encoded in _encoded(stored, shard, bytes_of):
        there = slice(piece.start, piece.start + piece.numel)
        coder.decode(encoded, flat[there], Place(None if rounded is None else rounded[there].cpu()))
    return flat


def is_of(stored: StoredTensor, shard: StoredShard, bytes_of: Bytes, weight: Held) -> bool:
    """Tell whether split masters belong to a parameter as it is now, by digest."""
    rounded = _rounded(stored, shard, weight)
    return all(
        fits_parameter(encoded.parts, rounded[piece.start : piece.start + piece.numel].cpu())
        for piece, encoded in _encoded(stored, shard, bytes_of)
    )


def on_drive(numel: int, dtype: torch.dtype, folder: Path) -> Tensor:
    """Return a flat tensor in a file without a name; it goes with the tensor.

    Raises:
        OutOfSpaceError, StoreError: the drive cannot hold it.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes < PAGE_BYTES:
        return torch.empty(numel, dtype=dtype)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="optstream-decoded-") as file:
            # a mapping of what is not there ends the process
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (OutOfSpaceError if full else StoreError)(
            error.errno,
            f"decoded state needs {format_bytes(num_bytes)} in {folder} for a while: "
            f"{error.strerror}; free space",
        ) from error


def _encoded(
    stored: StoredTensor, shard: StoredShard, bytes_of: Bytes
) -> Iterator[tuple[StoredPiece, Encoded]]:
    codec = CODECS[stored.codec]
    for piece in shard.pieces:
        data = bytes_of(piece, codec.stored_bytes(piece.numel))
        yield piece, Encoded.of(codec, data, piece.numel, piece.start)


def _rounded(stored: StoredTensor, shard: StoredShard, weight: Held) -> Tensor:
    stride = stored.stride or torch.empty(shard.region.shape, device="meta").stride()
    return in_memory_order(weight.of(shard.region).detach(), stride)
