"""Encode and decode whole tensors, as every test of a codec does."""

from __future__ import annotations

import torch
from torch import Tensor

from optstream.codecs import CODECS, Coder, Encoded, Place

CPU = torch.device("cpu")


def encoded(name: str, values: Tensor, place: Place | None = None) -> Encoded:
    """Return values encoded into bytes that held something else before."""
    codec = CODECS[name]
    stored = torch.full((codec.stored_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    target = Encoded.of(codec, stored, values.numel())
    Coder(CPU).encode(values, target, place or Place())
    return target


def decoded(source: Encoded, place: Place | None = None) -> Tensor:
    values = torch.full((source.numel,), 1.5)
    Coder(CPU).decode(source, values, place or Place())
    return values


def from_bits(bits: Tensor) -> Tensor:
    """Return the float32 numbers of these bit patterns, given as int64."""
    return bits.to(torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
