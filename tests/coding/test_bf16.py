"""bf16: rounded to the nearest or at random, and the random bits belong to the value's place."""

from __future__ import annotations

import pytest
import torch

from coding.whole import bits_of, decoded, encoded, from_bits
from optstream.codecs import CODECS, Coder, Encoded, Place, salt

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-45, 3.38e38])


def test_to_the_nearest() -> None:
    values = torch.cat([torch.randn(2**17 + 5), SPECIAL])
    back = decoded(encoded("bf16", values))
    assert torch.equal(bits_of(back), bits_of(values.bfloat16().float()))
    normal = values[: 2**17]
    assert ((back[: 2**17] - normal).abs() <= 2.0**-8 * normal.abs()).all()


def test_at_random_to_a_neighbour_with_the_right_mean() -> None:
    values = torch.randn(4096)
    below = from_bits(bits_of(values).long() & 0xFFFF0000)
    mean = torch.zeros(4096, dtype=torch.float64)
    num_steps = 2000
    for step in range(num_steps):
        back = decoded(encoded("bf16-stochastic", values, Place(salt=salt(0, step, "w/exp_avg"))))
        assert ((back - values).abs() < 2.0**-7 * values.abs()).all()
        mean += back / num_steps
    ulp = from_bits(bits_of(below).long() & 0x7F800000).double() * 2.0**-7
    # of 2000 draws the mean is known to 0.5 / sqrt(2000); the largest of 4096 is within 5 of those
    assert ((mean - values).abs() < 5 * 0.5 / num_steps**0.5 * ulp).all()
    assert abs(float(((mean - values) / ulp).mean())) < 1e-3


def test_small_changes_add_up_only_at_random() -> None:
    decayed, stuck = torch.ones(4096), torch.ones(4096)
    for step in range(1000):
        place = Place(salt=salt(0, step, "exp_avg_sq"))
        decayed = decoded(encoded("bf16-stochastic", decayed * 0.999, place))
        stuck = decoded(encoded("bf16", stuck * 0.999))
    assert abs(float(decayed.mean()) - 0.999**1000) < 0.01
    assert (stuck == 1).all()


def test_special_values_at_random() -> None:
    nans = from_bits(torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]))
    for step in range(50):
        place = Place(salt=salt(1, step, "x"))
        assert decoded(encoded("bf16-stochastic", nans, place)).isnan().all()
        back = decoded(encoded("bf16-stochastic", SPECIAL[:4].clone(), place))
        assert torch.equal(bits_of(back), bits_of(SPECIAL[:4]))


def test_what_is_bfloat16_already_stays() -> None:
    values = torch.randn(10000).bfloat16().float()
    assert torch.equal(decoded(encoded("bf16-stochastic", values, Place(salt=5))), values)


@pytest.mark.parametrize("cuts", [(4096,), (8192, 40960), (4096, 8192, 12288)])
def test_tiles_do_not_matter(cuts: tuple[int, ...]) -> None:
    values = torch.randn(50_000)
    whole = encoded("bf16-stochastic", values, Place(salt=7))
    codec = CODECS["bf16-stochastic"]
    stored = torch.zeros(codec.stored_bytes(50_000), dtype=torch.uint8)
    target = Encoded.of(codec, stored, 50_000)
    for start, stop in zip((0, *cuts), (*cuts, 50_000), strict=True):
        part = target.part(start, stop)
        Coder(values.device).encode(values[start:stop], part, Place(salt=7))
    assert torch.equal(target.parts[0].view(torch.int16), whole.parts[0].view(torch.int16))


def test_seed_step_and_name_draw_other_bits() -> None:
    values = torch.randn(4096)
    salts = [salt(0, 0, "a"), salt(1, 0, "a"), salt(0, 1, "a"), salt(0, 0, "b"), salt(0, 0, "a")]
    first, *others, again = [
        decoded(encoded("bf16-stochastic", values, Place(salt=each))) for each in salts
    ]
    assert torch.equal(first, again)
    for other in others:
        assert not torch.equal(first, other)
