"""bf16: values rounded to bfloat16, to the nearest or at random.

To the nearest, a value whose change in a step is below 1/512 of it does not change at all: with
beta2 = 0.999 a second moment grows but never decays. At random it goes to either neighbour with the
chance that makes the mean right, so small changes add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optstream.codecs.base import Codec, Part, Place
from optstream.codecs.noise import BLOCK, add_noise


class Bf16(Codec):
    """To the nearest, ties to even: |decoded - x| <= 2^-8 |x| for normal x.

    Infinities and NaN stay. What is above the largest bfloat16 by half a step (3.396e38) becomes
    infinity.
    """

    name = "bf16"
    parts = (Part(torch.bfloat16),)
    block = 1
    reader_dtype = torch.bfloat16

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        parts[0].copy_(values)

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> None:
        values.copy_(parts[0])


class StochasticBf16(Codec):
    """At random: |decoded - x| < 2^-7 |x| for normal x, and the mean of decoded is x.

    Checked, with the mean and its independence of tiles, by tests/coding/test_bf16.py.
    """

    name = "bf16-stochastic"
    parts = (Part(torch.bfloat16),)
    block = BLOCK
    reader_dtype = torch.bfloat16

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        bits = work[0].view(torch.int32)
        add_noise(values.view(torch.int32), bits, place)
        # an infinity has no lower bits that could carry, but a NaN may
        parts[0].view(torch.int16).copy_(bits.bitwise_right_shift_(16))
        if not values.is_cpu or not bool(values.sum().isfinite()):
            parts[0].copy_(torch.where(values.isnan(), torch.nan, parts[0]))

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> None:
        values.copy_(parts[0])
