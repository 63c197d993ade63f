"""The tables are the published ones, and the documented bands are what they give."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from optstream.muon.coefficients import BANDS, COEFFICIENTS, schedule

Polynomial = Callable[..., torch.Tensor]


def minimax_quintic(low: float, high: float) -> tuple[float, float, float]:
    """Find the odd quintic closest to 1 on [low, high] in the maximum norm, by Remez exchange."""
    if low > high * (1 - 5e-6):
        return 1.875 / high, -1.25 / high**3, 0.375 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(200):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return a, b, c


def test_polar_express_is_the_greedy_minimax_composition() -> None:
    # arXiv:2505.16932: interval [1e-3, 1], cushion 0.024..., recentred after each step
    low, high = 1e-3, 1.0
    for published in COEFFICIENTS["polar_express_exact"][:7]:
        a, b, c = minimax_quintic(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        centred = [2 / sum(ends) * value for value in (a, b, c)]
        assert centred == pytest.approx(published, rel=1e-10)
        low = 2 / sum(ends) * ends[0]
        high = 2 - low
    assert COEFFICIENTS["polar_express_exact"][7] == (15 / 8, -10 / 8, 3 / 8)


def test_safety_factor_stretches_all_polynomials_but_the_last(polynomial: Polynomial) -> None:
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    pairs = list(
        zip(COEFFICIENTS["polar_express"], COEFFICIENTS["polar_express_exact"], strict=True)
    )
    for safe, exact in pairs[:-1]:
        torch.testing.assert_close(polynomial(x, (safe,)), polynomial(x / 1.01, (exact,)))
    assert pairs[-1][0] == pairs[-1][1]


def test_quintic_is_the_one_of_torch() -> None:
    muon = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))])
    assert COEFFICIENTS["quintic"] == (muon.defaults["ns_coefficients"],)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_band_is_tight(name: str, polynomial: Polynomial) -> None:
    floor, low, high = BANDS[name]
    points = 200_000
    above_floor = torch.cat(
        [
            torch.logspace(math.log10(floor), 0, points, dtype=torch.float64),
            torch.linspace(floor, 1, points, dtype=torch.float64),
        ]
    )
    result = polynomial(above_floor, schedule(name, 5))
    below_floor = polynomial(
        torch.linspace(0, floor, points, dtype=torch.float64), schedule(name, 5)
    )
    highest = max(result.max().item(), below_floor.max().item())
    assert low - 1e-9 <= result.min().item() < low + 2e-4
    assert high - 2e-4 < highest <= high + 1e-9


def test_schedule_takes_a_prefix_and_repeats_the_last() -> None:
    table = COEFFICIENTS["polar_express"]
    assert schedule("polar_express", 3) == table[:3]
    assert schedule("polar_express", 10) == (*table, table[-1], table[-1])
    assert schedule("quintic", 2) == COEFFICIENTS["quintic"] * 2
    assert schedule((1, 2, 3), 2) == ((1.0, 2.0, 3.0),) * 2
    assert schedule(((1, 2, 3), (4, 5, 6)), 3) == ((1, 2, 3), (4, 5, 6), (4, 5, 6))


def test_many_polar_express_steps_reach_one(polynomial: Polynomial) -> None:
    x = torch.logspace(-3, 0, 1000, dtype=torch.float64)
    torch.testing.assert_close(polynomial(x, schedule("polar_express", 9)), torch.ones_like(x))
