"""Random bits that depend on (seed, step, tensor, index) alone: any tile gets its own again.

For each block of 4096 values 16 random bits are drawn by a counter-based hash; a value's bits are
those of its block XOR those of its place in a fixed table. So each value's bits are uniform and
independent from step to step; within a block they are not independent of each other.
"""

from __future__ import annotations

import zlib
from functools import cache

import torch
from torch import Tensor

from optstream.codecs.base import Place, rows

BLOCK = 4096
_BITS = 0xFFFF


def salt(seed: int, step: int, name: str) -> int:
    """Return what tells this tensor's bits in this step from all others (32 bits)."""
    return zlib.crc32(f"{seed}/{step}/{name}".encode())


def add_noise(bits: Tensor, out: Tensor, place: Place) -> None:
    """Add 16 random bits to each of some int32; `place.start` is a multiple of BLOCK."""
    table = rows(bits, BLOCK)
    target = out.view(table.shape)
    fixed = _table(bits.device)[: table.shape[1]]
    torch.bitwise_xor(fixed, _blocks(place, len(table), bits.device)[:, None], out=target)
    torch.add(table, target, out=target)


def _blocks(place: Place, count: int, device: torch.device) -> Tensor:
    """Hash the numbers of blocks. Source: MurmurHash3's finalizer."""
    first = place.start // BLOCK
    x = torch.arange(first, first + count, device=device)
    x = (x * 0x9E3779B1 + place.salt) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) & _BITS).to(torch.int32)


@cache
def _table(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(16)
    # every multiple of 16 once: a block's bits are spread evenly
    return (torch.randperm(BLOCK, generator=generator).to(torch.int32) * 16).to(device)
