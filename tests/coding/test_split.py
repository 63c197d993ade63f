"""split: every master comes back from its parameter and 16 bits; a changed parameter is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coding.whole import bits_of, decoded, encoded, from_bits
from optstream.codecs import CODECS, Coder, Encoded, Place
from optstream.codecs.split import BLOCK, digest

BF16 = torch.bfloat16
SIGN = 0x8000
UPPER_HALVES = {
    "zero": 0x0000,
    "negative zero": 0x8000,
    "smallest subnormal": 0x0001,
    "largest subnormal": 0x007F,
    "smallest normal": 0x0080,
    "one": 0x3F80,
    "odd": 0x3F81,
    "negative": 0xC2A5,
    "largest, rounds up to infinity": 0x7F7F,
    "most negative": 0xFF7F,
}


def round_trip(masters: Tensor) -> None:
    param = masters.to(BF16)
    place = Place(param)
    back = decoded(encoded("split", masters, place), place)
    assert torch.equal(bits_of(back), bits_of(masters))
    # where the parameter is left out, it is what the masters round to
    assert torch.equal(bits_of(decoded(encoded("split", masters), place)), bits_of(masters))


@pytest.mark.parametrize("upper", UPPER_HALVES.values(), ids=UPPER_HALVES)
def test_every_lower_half(upper: int) -> None:
    round_trip(from_bits((upper << 16) | torch.arange(2**16)))


def test_infinities() -> None:
    round_trip(from_bits(torch.tensor([0x7F800000, 0xFF800000, 0x7F7F8000, 0xFF7FFFFF])))


def test_random_masters() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**32, (3 * 2**18 + 77,), generator=generator)
    masters = from_bits(bits)
    round_trip(torch.where(masters.isnan(), 1.0, masters))


@pytest.mark.parametrize("count", [1, 2, 3, 100, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("upper", [0x3F80, 0x3F81], ids=["rounded down", "rounded up"])
def test_blocks_of_nothing_but_ties(upper: int, count: int) -> None:
    round_trip(from_bits(torch.full((count,), (upper << 16) | 0x8000)))


def test_ties_in_a_block_that_uses_every_small_code() -> None:
    """Of 4096 values one is a tie, and the others take the codes that would stand for it."""
    lower = torch.arange(BLOCK)
    lower[0] = 0x8000
    round_trip(from_bits((0x3F80 << 16) | lower))
    for tie in (1, 2, BLOCK // 2):
        lower = torch.arange(1, BLOCK + 1)
        lower[tie] = 0x8000
        round_trip(from_bits((0x3F80 << 16) | lower))


def test_not_a_number_stays_one() -> None:
    masters = from_bits(torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC08000]))
    for conversion in (masters.to(BF16), torch.full((5,), torch.nan, dtype=BF16)):
        for nans in (conversion, -conversion):
            back = decoded(encoded("split", masters, Place(nans)), Place(nans))
            assert back.isnan().all()
            assert torch.equal(back.signbit(), nans.signbit())


def test_numbers_beside_nan_are_exact() -> None:
    masters = from_bits((0x3F80 << 16) | torch.arange(BLOCK) * 16)
    masters[5::7] = torch.nan
    place = Place(masters.to(BF16))
    back = decoded(encoded("split", masters, place), place)
    keep = ~masters.isnan()
    assert torch.equal(bits_of(back)[keep], bits_of(masters)[keep])


def test_a_changed_parameter_is_seen_and_its_block_follows() -> None:
    masters = torch.randn(3 * BLOCK + 10)
    param = masters.to(BF16)
    stored = encoded("split", masters, Place(param))
    changed = param.clone()
    changed[BLOCK + 7] *= 2
    values = torch.empty_like(masters)
    found = Coder(masters.device).decode(stored, values, Place(changed))
    assert found
    expected = masters.clone()
    expected[BLOCK : 2 * BLOCK] = changed[BLOCK : 2 * BLOCK].float()
    assert torch.equal(bits_of(values), bits_of(expected))
    assert not Coder(masters.device).decode(stored, values, Place(param))
    assert torch.equal(values, masters)


def test_a_changed_parameter_with_ties_follows() -> None:
    masters = from_bits(torch.full((BLOCK,), 0x3F808000))
    stored = encoded("split", masters)
    other = torch.full((BLOCK,), 3.0, dtype=BF16)
    assert torch.equal(decoded(stored, Place(other)), other.float())


CHANGES = {
    "one bit": lambda p: p.index_put_((torch.tensor([100]),), p[100] ^ 1),
    "one sign": lambda p: p.index_put_((torch.tensor([100]),), p[100] ^ -0x8000),
    "all signs": lambda p: p.bitwise_xor_(-0x8000),
    "two swapped": lambda p: p.index_copy_(0, torch.tensor([3, 4]), p[[4, 3]]),
    "far ones swapped": lambda p: p.index_copy_(0, torch.tensor([3, 2000]), p[[2000, 3]]),
    "reversed": lambda p: p.copy_(p.flip(0)),
    "one step up": lambda p: p.add_(1),
    "zeros": lambda p: p.zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("numel", [BLOCK, BLOCK - 95])
def test_the_digest_sees(change, numel: int) -> None:  # type: ignore[no-untyped-def]
    param = torch.randn(numel).to(BF16)
    other = param.clone()
    change(other.view(torch.int16))
    work = torch.empty(numel)
    assert digest(param, work) != digest(other, work)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_the_digest_does_not_depend_on_where_the_parameter_lies(offset: int) -> None:
    storage = torch.zeros(3 * BLOCK + 10, dtype=BF16)
    param = torch.randn(2 * BLOCK + 5).to(BF16)
    inside = storage[offset : offset + len(param)]
    inside.copy_(param)
    masters = param.float()
    assert torch.equal(decoded(encoded("split", masters, Place(param)), Place(inside)), masters)
    head, work = param[: 2 * BLOCK], torch.empty(2 * BLOCK)
    assert torch.equal(digest(head, work), digest(inside[: 2 * BLOCK], work))


def test_two_bytes_a_value() -> None:
    assert CODECS["split"].stored_bytes(2**20) == 2**21 + 2 * 4 * 2**20 // BLOCK


def test_parts_of_an_extent_are_independent() -> None:
    masters = torch.randn(5 * BLOCK)
    whole = encoded("split", masters)
    codec = CODECS["split"]
    stored = torch.zeros(codec.stored_bytes(5 * BLOCK), dtype=torch.uint8)
    target = Encoded.of(codec, stored, 5 * BLOCK)
    coder = Coder(masters.device)
    for start, stop in ((2 * BLOCK, 5 * BLOCK), (0, 2 * BLOCK)):
        coder.encode(masters[start:stop], target.part(start, stop), Place())
    assert all(torch.equal(a, b) for a, b in zip(target.parts, whole.parts, strict=True))
