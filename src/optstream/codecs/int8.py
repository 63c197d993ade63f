"""int8: one byte a value, relative to the largest of its block.

Steps get smaller towards zero, so that small values are kept apart beside large ones. With s the
largest magnitude of the block:

    signed      x = sign(c) (|c| / 127)^2 s       c in -127 ... 127, momentum
    positive    x = (c / 255)^4 s                 c in 0 ... 255, second moments

For a block of normally distributed momentum the mean square error is that of even steps; a value of
s / 1000, which even steps would make zero, is still known to an eighth. What is stored per block is
the step of the roots, sqrt(s) / 127 or s^(1/4) / 255, rounded up to 16 bits of precision: so a code
times the step is exact, its square's root is itself again, and what was decoded encodes to the same
bytes. Blocks are 128 values of one parameter, counted from its start.

A block with an infinity, a NaN or (positive) a number below 0 decodes to nothing finite.

Source: scales by block and uneven steps are from arXiv:2110.02861; these maps are chosen for what
they cost. Bounds are checked by tests/coding/test_int8.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optstream.codecs.base import Codec, Part, Place, rows

BLOCK = 128
SMALLEST_STEP = 2.0**-100
"""Taken where all is zero, so that its inverse is finite."""

_LOWEST_BITS = 0xFF
_NAN = 0x7FC00000
"""As an integer, the largest that `_LOWEST_BITS` can be added to; still a NaN."""

_TO_INTEGER = 1.5 * 2.0**23
"""Added to a float32 near zero it rounds it to an integer, which is then in the lowest bits."""


class Int8(Codec):
    """Momentum (signed) or second moments (positive).

    signed: |decoded - x| <= sqrt(|x| s) / 127 + s / 254^2. 0 stays 0.

    positive: |decoded - x| <= ((r + 1/510)^4 - r^4) s, with r = (x / s)^(1/4). 0 stays 0. What is
    above never becomes 0, or a rule would divide by it: x below (1/510)^4 s, 1.5e-11 s, becomes
    (1/255)^4 s, 2.4e-10 s.
    """

    block = BLOCK

    def __init__(self, *, signed: bool) -> None:
        self._signed = signed
        self._largest_code = 127 if signed else 255
        self.name = "int8-signed" if signed else "int8-positive"
        self.parts = (Part(torch.int8 if signed else torch.uint8), Part(torch.float32, BLOCK))

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        number, lift = work
        take_root = torch.abs if self._signed else torch.sqrt
        take_root(values, out=number).sqrt_()
        torch.amax(rows(number, BLOCK), 1, out=steps)
        _round_up(steps.div_(self._largest_code))
        if self._signed:
            torch.copysign(number, values, out=number)
        rows(number, BLOCK).mul_(steps.reciprocal()[:, None])
        number.add_(_TO_INTEGER)
        codes.copy_(number.view(torch.int32))
        # what has become 0 besides 0 is rare; `codes` is small and in the cache
        if not self._signed and (not codes.is_cpu or int(codes.amin()) == 0):
            torch.sign(values, out=lift).add_(_TO_INTEGER)
            torch.maximum(number, lift, out=number)
            codes.copy_(number.view(torch.int32))

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        values.copy_(codes)
        rows(values, BLOCK).mul_(steps[:, None])
        if self._signed:
            values.mul_(torch.abs(values, out=work[0]))
        else:
            values.square_().square_()


def _round_up(steps: Tensor) -> None:
    """Round to 16 bits of precision, in place; infinities and NaN stay."""
    bits = steps.abs_().clamp_(min=SMALLEST_STEP).view(torch.int32)
    bits.clamp_(max=_NAN).add_(_LOWEST_BITS).bitwise_and_(~_LOWEST_BITS)
