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


class SignedInt8(Codec):
    """Momentum: |decoded - x| <= sqrt(|x| s) / 127 + s / 254^2. 0 stays 0."""

    name = "int8-signed"
    parts = (Part(torch.int8), Part(torch.float32, BLOCK))
    block = BLOCK

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        root, number = work
        torch.abs(values, out=root).sqrt_()
        _count_steps(root, steps, 127)
        codes.copy_(torch.copysign(root, values, out=number))

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        values.copy_(codes)
        rows(values, BLOCK).mul_(steps[:, None])
        values.mul_(torch.abs(values, out=work[0]))


class PositiveInt8(Codec):
    """Second moments: |decoded - x| <= ((r + 1/510)^4 - r^4) s, with r = (x / s)^(1/4).

    0 stays 0. What is above never becomes 0, or a rule would divide by it: x below (1/510)^4 s,
    1.5e-11 s, becomes (1/255)^4 s, 2.4e-10 s.
    """

    name = "int8-positive"
    parts = (Part(torch.uint8), Part(torch.float32, BLOCK))
    block = BLOCK

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        root, sign = work
        torch.sqrt(values, out=root).sqrt_()
        torch.sign(root, out=sign)
        _count_steps(root, steps, 255)
        # straight to uint8 is three times slower on a CPU
        codes.copy_(sign.view(torch.int32).copy_(torch.maximum(root, sign, out=root)))

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, steps = parts
        values.copy_(codes)
        rows(values, BLOCK).mul_(steps[:, None])
        values.square_().square_()


def _count_steps(root: Tensor, steps: Tensor, largest_code: int) -> None:
    """Store each block's step, and make roots numbers of steps, in place."""
    torch.amax(rows(root, BLOCK), 1, out=steps)
    steps.div_(largest_code)
    upward = ((steps.view(torch.int32) + _LOWEST_BITS) & ~_LOWEST_BITS).view(torch.float32)
    torch.where(steps.isfinite(), upward, steps, out=steps)
    steps.clamp_(min=SMALLEST_STEP)
    rows(root, BLOCK).mul_(steps.reciprocal()[:, None])
    root.round_()
