"""Coefficients of the Newton-Schulz polynomials p(x) = a x + b x^3 + c x^5, one triple per step."""

from __future__ import annotations

import math
from typing import NamedTuple

Triple = tuple[float, float, float]

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024),
# https://kellerjordan.github.io/posts/muon/; also the default of torch.optim.Muon.
_QUINTIC = ((3.4445, -4.7750, 2.0315),)

# You Jiacheng's five polynomials as used in modded-nanogpt (train_gpt_medium.py); how they were
# found: https://leloykun.github.io/ponder/muon-opt-coeffs/
_QUINTIC_SCHEDULE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel, Persson, Musco, Gower, "The Polar Express" (2025), arXiv:2505.16932, Algorithm 1: greedily
# minimax on [1e-3, 1] with cushion 0.02407...; recomputed by test_coefficients.py.
_POLAR_EXPRESS_EXACT = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# The same paper, section 4.4: p(x / 1.01) for all but the last, so that a singular value which
# rounding pushed above 1 stays inside the interval. The paper also divides by 1.01 times the norm
# because its norm is taken in bf16; ours never is.
_SAFETY = 1.01
_POLAR_EXPRESS = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS_EXACT[:-1]),
    _POLAR_EXPRESS_EXACT[-1],
)

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "quintic": _QUINTIC,
    "quintic_schedule": _QUINTIC_SCHEDULE,
    "polar_express": _POLAR_EXPRESS,
    "polar_express_exact": _POLAR_EXPRESS_EXACT,
}


class Band(NamedTuple):
    """Where five steps put a singular value, in exact arithmetic.

    Attributes:
        floor: smallest relative singular value (of the Frobenius norm) the lower edge holds for.
        low: every value in [floor, 1] ends at `low` or above.
        high: every value in [0, 1] ends at `high` or below.
    """

    floor: float
    low: float
    high: float


# The edges were computed on 2e6 points; test_coefficients.py recomputes them.
BANDS: dict[str, Band] = {
    "quintic": Band(2e-3, 0.6818, 1.2024),
    "quintic_schedule": Band(2e-3, 0.8524, 1.1451),
    "polar_express": Band(2e-3, 0.8702, 1.1236),
    "polar_express_exact": Band(1e-3, 0.8764, 1.1236),
}


def schedule(coefficients: str | Triple | tuple[Triple, ...], ns_steps: int) -> tuple[Triple, ...]:
    """Return the polynomial of each of `ns_steps` steps.

    A table that is shorter than `ns_steps` is continued by repeating its last polynomial; of one
    that is longer, the first `ns_steps` are used.
    """
    table = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else as_table(coefficients)
    return (*table[:ns_steps], *(table[-1:] * (ns_steps - len(table))))


def as_table(coefficients: Triple | tuple[Triple, ...]) -> tuple[Triple, ...]:
    """Return one or several (a, b, c) as a tuple of triples of floats.

    Raises:
        TypeError, ValueError: it is neither, or a number is not finite.
    """
    rows = coefficients if isinstance(coefficients[0], (tuple, list)) else (coefficients,)
    table = []
    for row in rows:
        a, b, c = map(float, row)
        if not all(map(math.isfinite, (a, b, c))):
            raise ValueError(f"{row!r} is not finite")
        table.append((a, b, c))
    return tuple(table)
