"""split: what a bfloat16 parameter does not hold of its float32 master.

A parameter p is its master m, rounded to the nearest, ties to even. With both as bit patterns,

    m = (p << 16) + d,      d in [-0x8000, 0x8000]

holds for every m that is not NaN: also for -0, for subnormals, and where m rounds up to infinity.
Those are 65537 differences (d = -0x8000: a tie that was rounded up, +0x8000: one that was rounded
down; p is even for both), one more than 16 bits can tell apart. A block has fewer values than there
are codes, so in a block with ties that were rounded down some code stands for no value: the block's
`escape`, which stands for them.

NaN stays NaN, with the parameter's sign and upper payload.

Checked for every d and every kind of p by tests/coding/test_split.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from optstream.codecs.base import Codec, Part, Place, rows

BLOCK = 4096
TIE = 0x8000
NO_ESCAPE = 0x10000
"""No code, so that it equals none."""

_LOWEST_17 = 0x1FFFF
"""A tie has TIE there if the upper half is even: then it is the parameter, rounded down."""

_CHECKED_AT_ONCE = 2**20


class Split(Codec):
    """Differences (16 bits), and per block an escape and a digest of the parameter's bits.

    The digest tells a parameter that something else has written since: the masters of such a block
    are the parameter, widened.
    """

    name = "split"
    parts = (Part(torch.int16), Part(torch.int32, BLOCK), Part(torch.int32, BLOCK))
    block = BLOCK

    def encode(
        self, values: Tensor, parts: Sequence[Tensor], place: Place, work: Sequence[Tensor]
    ) -> None:
        codes, escapes, digests = parts
        rounded = place.rounded
        if rounded is None:
            rounded = work[1].view(torch.bfloat16)[: values.numel()].copy_(values)
        bits = values.view(torch.int32)
        codes.copy_(bits)
        escapes.fill_(NO_ESCAPE)
        digests.copy_(digest(rounded, work[0]))
        _escape_ties(rows(bits, BLOCK), rows(codes, BLOCK), escapes)

    def decode(
        self, parts: Sequence[Tensor], values: Tensor, place: Place, work: Sequence[Tensor]
    ) -> Tensor | None:
        codes, escapes, digests = parts
        rounded = place.rounded
        assert rounded is not None
        found = digest(rounded, work[0])
        changed = None
        if not torch.equal(digests, found):
            differs = digests != found
            changed = differs.any()
            # no escape is 0, so none applies there
            codes = rows(codes, BLOCK).masked_fill(differs[:, None], 0).view(-1)
        bits = values.copy_(rounded).view(torch.int32)
        bits.add_(codes)
        _restore_ties(rows(bits, BLOCK), rows(codes, BLOCK), escapes)
        return changed


def fits_parameter(parts: Sequence[Tensor], rounded: Tensor) -> bool:
    """Tell whether split masters were stored with this parameter; nothing is decoded.

    Args:
        parts: of the extent.
        rounded: flat bfloat16, on the same device.
    """
    work = torch.empty(_CHECKED_AT_ONCE, dtype=torch.float32, device=rounded.device)
    whole = len(rounded) // BLOCK * BLOCK
    bounds = [*range(0, whole, _CHECKED_AT_ONCE), *([whole] if whole else []), len(rounded)]
    return all(
        torch.equal(parts[2][start // BLOCK : -(-stop // BLOCK)], digest(rounded[start:stop], work))
        for start, stop in pairwise(bounds)
        if stop > start
    )


def digest(rounded: Tensor, work: Tensor) -> Tensor:
    """Return a digest (int32) of each block of a bfloat16 parameter.

    sum of w[i] (p[2i] + 2^16 p[2i+1]) mod 2^32 over the block's bit patterns p, with fixed odd
    weights w; any single change shows, others but for one in 2^32.

    Args:
        work: float32, at least as long.
    """
    pairs = -(-rounded.numel() // 2)
    if rounded.numel() % 2 or rounded.storage_offset() % 2:
        # a parameter that is a view may start anywhere
        padded = rounded.new_zeros(2 * pairs, dtype=torch.int16)
        padded[: rounded.numel()].copy_(rounded.view(torch.int16))
        words = padded.view(torch.int32)
    else:
        words = rounded.view(torch.int32)
    table = rows(words, BLOCK // 2)
    product = work.view(torch.int32)[:pairs].view(table.shape)
    torch.mul(table, _weights(words.device)[: table.shape[1]], out=product)
    return product.sum(1, dtype=torch.int32)


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    drawn = torch.randint(-(2**31), 2**31, (BLOCK // 2,), generator=generator)
    return (drawn.to(torch.int32) | 1).to(device)


def _escape_ties(bits: Tensor, codes: Tensor, escapes: Tensor) -> None:
    """Give ties that were rounded down a code that no value of their block has."""
    candidates = [block for block, least in enumerate(codes.amin(1).tolist()) if least == -TIE]
    if not candidates:
        return
    tied = bits[candidates].bitwise_and_(_LOWEST_17) == TIE
    for row in tied.any(1).nonzero().view(-1).tolist():
        # blocks with ties are few, and views of one are faster than indices
        block = candidates[row]
        free = _free_code(codes[block])
        escapes[block] = free
        codes[block].masked_fill_(tied[row], free)


def _free_code(codes: Tensor) -> int:
    """Return a code above 0 that does not occur; ties of both kinds are -0x8000 here."""
    if not bool((codes == 1).any()):
        return 1
    taken = torch.zeros(codes.numel() + 2, dtype=torch.bool, device=codes.device)
    positive = codes[(codes > 0) & (codes < len(taken))]
    taken[positive.long()] = True
    taken[0] = True
    return int(taken.logical_not_().nonzero()[0])


def _restore_ties(bits: Tensor, codes: Tensor, escapes: Tensor) -> None:
    for block, free in enumerate(escapes.tolist()):
        if free != NO_ESCAPE:
            bits[block].add_(codes[block] == free, alpha=TIE - free)
