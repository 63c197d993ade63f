"""int8: the error is within the stated bound in every block, and blocks are apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coding.whole import bits_of, decoded, encoded
from optstream.codecs.int8 import BLOCK, _round_up

NAMES = pytest.mark.parametrize("name", ["int8-signed", "int8-positive"])
ROUNDING = 1 + 2.0**-14
"""Steps are stored rounded up, to 16 bits."""


def samples(name: str) -> Tensor:
    """Return blocks of many kinds: flat, spread over decades, sparse, tiny, huge, and a rest."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, BLOCK, generator=generator)
    decades = normal * 10.0 ** -torch.randint(0, 12, (64, BLOCK), generator=generator)
    sparse = normal * (torch.rand(64, BLOCK, generator=generator) < 0.05)
    kinds = [normal, decades, sparse, normal * 1e-12, normal * 1e12, torch.zeros(1, BLOCK)]
    values = torch.cat([*(kind.flatten() for kind in kinds), normal.flatten()[:77]])
    return values if name == "int8-signed" else values.square()


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of each value's block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK))
    return padded.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)[: len(values)]


def test_the_bound_of_signed_values() -> None:
    values = samples("int8-signed").double()
    back = decoded(encoded("int8-signed", values.float())).double()
    s = largest(values)
    bound = (values.abs() * s).sqrt() / 127 + s / 254**2
    assert ((back - values).abs() <= bound * ROUNDING + 1e-30).all()
    assert (back.sign() * values.sign() >= 0).all()


def test_the_bound_of_positive_values() -> None:
    values = samples("int8-positive").double()
    back = decoded(encoded("int8-positive", values.float())).double()
    s = largest(values)
    r = (values / s.clamp(min=1e-300)) ** 0.25
    bound = ((r + 1 / 510) ** 4 - r**4) * s
    tiny = (values > 0) & (r < 1 / 510)
    assert ((back - values).abs()[~tiny] <= (bound * ROUNDING + 1e-6 * values)[~tiny]).all()
    assert ((back[tiny] - s[tiny] / 255**4).abs() <= 1e-3 * s[tiny] / 255**4).all()


def test_small_second_moments_never_become_zero() -> None:
    values = torch.full((BLOCK,), 1e-20)
    values[0], values[1] = 1.0, 0.0
    back = decoded(encoded("int8-positive", values))
    assert back[1] == 0
    assert (back[2:] > 0).all()


@NAMES
def test_zero_and_the_largest_stay(name: str) -> None:
    values = torch.zeros(2 * BLOCK)
    values[5] = 0.37
    back = decoded(encoded(name, values))
    assert (back[values == 0] == 0).all()
    assert abs(float(back[5]) / 0.37 - 1) < 2.0**-12


@NAMES
def test_blocks_do_not_touch_each_other(name: str) -> None:
    values = samples(name)
    expected = decoded(encoded(name, values))
    changed = values.clone()
    changed[:BLOCK] = 1e30
    back = decoded(encoded(name, changed))
    assert torch.equal(bits_of(back)[BLOCK:], bits_of(expected)[BLOCK:])


@NAMES
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(name: str, poison: float) -> None:
    values = samples(name)
    values[3 * BLOCK + 9] = poison
    back = decoded(encoded(name, values))
    assert not back[3 * BLOCK : 4 * BLOCK].isfinite().any()
    assert back[: 3 * BLOCK].isfinite().all()
    assert back[4 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F800000], ids=hex)
def test_a_step_that_is_no_number_stays_so(bits: int) -> None:
    """Processors differ in the NaN they make; some are the largest integers there are."""
    steps = torch.tensor([1.0, 1.0])
    steps.view(torch.int32)[1] = bits
    _round_up(steps)
    assert steps[0] == 1
    assert not steps[1].isfinite()


def test_negative_second_moments_are_not_hidden() -> None:
    values = torch.ones(BLOCK)
    values[3] = -1e-3
    assert decoded(encoded("int8-positive", values)).isnan().all()


@NAMES
def test_what_was_decoded_encodes_to_the_same_bytes(name: str) -> None:
    many = torch.randn(5000 * BLOCK, generator=torch.Generator().manual_seed(1))
    values = torch.cat([many if name == "int8-signed" else many.square(), samples(name)])
    once = encoded(name, values)
    twice = encoded(name, decoded(once))
    for a, b in zip(once.parts, twice.parts, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
