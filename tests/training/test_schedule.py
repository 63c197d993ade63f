"""The learning rate over a run."""

import pytest

from optstream.training.schedule import learning_rate_share


@pytest.mark.parametrize("num_steps", [2, 10, 200, 5000])
def test_rises_to_the_peak_then_falls_to_a_tenth(num_steps):
    shares = [learning_rate_share(step, num_steps) for step in range(num_steps + 1)]
    peak = shares.index(max(shares))
    assert max(shares) == 1
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[0] > 0
    assert shares[-1] == pytest.approx(0.1)


def test_a_single_step_has_the_peak_rate():
    assert learning_rate_share(0, 1) == 1


def test_warm_up_is_a_tenth_but_at_most_100_steps():
    assert learning_rate_share(19, 200) == 1
    assert learning_rate_share(18, 200) < 1
    assert learning_rate_share(99, 5000) == 1
