"""Tensors that are ranges of files: bytes move when they are looked at, into page cache only.

Mappings are private and writable: a file never changes through them, and an accidental write costs
a page instead of the process. They are charged to no commit limit (MAP_NORESERVE). A mapping lives
as long as the last tensor over it. Every tensor has a storage of exactly its own size, which
torch.save and torch.distributed.checkpoint need in order to copy nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optstream.errors import StoreError
from optstream.plan import aligned
from optstream.store.base import FrozenFile
from optstream.units import PAGE_BYTES

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class FileRange:
    """Bytes of a window's file."""

    file: FrozenFile
    offset: int
    num_bytes: int


class Mapping:
    """Ranges of files, one behind the other in memory; unmapped when the object is gone."""

    def __init__(self, ranges: Sequence[FileRange]) -> None:
        """Map the ranges.

        Args:
            ranges: all but the last a multiple of PAGE_BYTES long; all but the first at a multiple
                of PAGE_BYTES in their file, and the first too if there are several.

        Raises:
            StoreError: the kernel refuses.
        """
        lead = ranges[0].offset % PAGE_BYTES
        assert len(ranges) == 1 or lead == 0
        total = aligned(lead + sum(part.num_bytes for part in ranges), PAGE_BYTES)
        base = _map(None, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._release = weakref.finalize(self, _libc.munmap, base, total)
        # whatever still runs while the interpreter ends may look at a tensor
        self._release.atexit = False
        # a file may be written again when nobody holds its frozen form any more
        self._files = [part.file for part in ranges]
        self.address = base + lead
        at = base
        for part in ranges:
            assert (part.offset - lead) % PAGE_BYTES == 0
            num_bytes = aligned(lead + part.num_bytes, PAGE_BYTES)
            _map(at, num_bytes, mmap.MAP_PRIVATE | _MAP_FIXED, part.file.fd, part.offset - lead)
            at += num_bytes
            lead = 0

    def tensor(self, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor over a part of the mapping; it keeps the mapping alive."""
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        memory = (ctypes.c_ubyte * num_bytes).from_address(self.address + offset)
        weakref.finalize(memory, _keep, self).atexit = False
        return torch.frombuffer(memory, dtype=dtype)


def _map(at: int | None, num_bytes: int, flags: int, fd: int, offset: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(at, num_bytes, protection, flags | _MAP_NORESERVE, fd, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise StoreError(
            number,
            f"cannot map {num_bytes} bytes of state: {os.strerror(number)}; use larger windows, or "
            "raise the limits of this process (ulimit -v, vm.max_map_count)",
        )
    return int(address)


def _keep(mapping: Mapping) -> None:
    """Hold a mapping until the memory that is finalized with it is gone."""
