"""newton_schulz against singular value decompositions in float64, at every shape and scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optstream.muon import newton_schulz, newton_schulz_flops
from optstream.muon.coefficients import BANDS, COEFFICIENTS, Triple, schedule
from optstream.muon.newton_schulz import default_ns_dtype, uses_gram

Reference = Callable[[Tensor, tuple[Triple, ...]], Tensor]
Build = Callable[[int, int, Tensor], Tensor]

SHAPES = [(64, 64), (48, 80), (80, 48), (32, 64), (64, 32), (32, 200), (200, 32), (1, 50), (50, 1)]
SPECTRA = {
    "flat": lambda m: torch.ones(m),
    "linear": lambda m: torch.linspace(0.01, 1, m),
    "1e4": lambda m: torch.logspace(-4, 0, m),
    "1e6": lambda m: torch.logspace(-6, 0, m),
    "half the rank": lambda m: (torch.arange(m) >= m // 2).double(),
    "one direction": lambda m: torch.where(torch.arange(m) == 0, 1.0, 1e-5),
}


def rounding_bound(coefficients: tuple[Triple, ...], eps: float) -> float:
    """A few roundings of the input, times the steepest slope of the whole map on [0, 1]."""
    s = torch.cat([torch.linspace(0, 1, 20001), torch.logspace(-6, 0, 20001)]).double()
    slope = torch.ones_like(s)
    for a, b, c in coefficients:
        slope *= a + 3 * b * s**2 + 5 * c * s**4
        s = a * s + b * s**3 + c * s**5
    return 4 * eps * slope.abs().max().item()


def spectral_norm(x: Tensor) -> float:
    return torch.linalg.matrix_norm(x.double(), 2).item()


def one(x: Tensor, coefficients: tuple[Triple, ...], **options: object) -> Tensor:
    return newton_schulz(x[None], coefficients, **options)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 3, 5, 10])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_float32_stays_within_the_rounding_bound(
    name: str, steps: int, reference: Reference, with_spectrum: Build
) -> None:
    coefficients = schedule(name, steps)
    bound = rounding_bound(coefficients, torch.finfo(torch.float32).eps)
    for rows, cols in SHAPES:
        for kind, spectrum in SPECTRA.items():
            x = with_spectrum(rows, cols, spectrum(min(rows, cols))).float()
            error = spectral_norm(one(x, coefficients) - reference(x, coefficients))
            assert error < bound, f"{rows}x{cols}, {kind}: {error:.1e} > {bound:.1e}"


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_float64_stays_within_its_rounding_bound(
    name: str, reference: Reference, with_spectrum: Build
) -> None:
    coefficients = schedule(name, 5)
    for rows, cols in SHAPES:
        x = with_spectrum(rows, cols, torch.logspace(-4, 0, min(rows, cols)))
        error = spectral_norm(one(x, coefficients) - reference(x, coefficients))
        # the decomposition of the reference has rounding errors of its own
        assert error < 10 * rounding_bound(coefficients, torch.finfo(torch.float64).eps)


@pytest.mark.parametrize(
    ("dtype", "slack"),
    [(torch.float32, 1e-3), (torch.float16, 0.02), (torch.bfloat16, 0.1)],
)
@pytest.mark.parametrize("name", ["quintic", "quintic_schedule", "polar_express"])
def test_singular_values_lie_in_the_documented_band(
    name: str, dtype: torch.dtype, slack: float, with_spectrum: Build
) -> None:
    floor, low, high = BANDS[name]
    for rows, cols in SHAPES:
        m = min(rows, cols)
        spectrum = torch.logspace(0, math.log10(floor * math.sqrt(m)), m)
        x = with_spectrum(rows, cols, spectrum).float()
        values = torch.linalg.svdvals(one(x, schedule(name, 5), dtype=dtype).double())
        assert values.min() > low - slack, f"{rows}x{cols}"
        assert values.max() < high + slack, f"{rows}x{cols}"


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_does_not_matter_above_eps(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # 2^100 overflows and 2^-20 has a norm near 1e-4; powers of two give the same bits
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    expected = one(x, schedule("quintic", 5), dtype=dtype)
    for exponent in (-20, 100, 120):
        assert torch.equal(one(x * 2.0**exponent, schedule("quintic", 5), dtype=dtype), expected)


def test_largest_and_smallest_numbers_stay_finite() -> None:
    coefficients = schedule("quintic", 5)
    for sign in (1, -1):
        huge = torch.full((8, 8), sign * torch.finfo(torch.float32).max)
        assert spectral_norm(one(huge, coefficients)) == pytest.approx(1, abs=0.33)
        assert (one(huge, coefficients) * sign > 0).all()
    for x in (torch.full((8, 8), 1e-45), torch.zeros(8, 24), torch.zeros(1, 1)):
        assert one(x, coefficients).abs().max() < 1e-30
    assert not one(torch.zeros(8, 24), coefficients).any()


def test_a_norm_below_eps_fades_in_proportion() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    x /= x.norm()
    slope = math.prod(a for a, _, _ in schedule("quintic", 5))
    faded = one(x * 1e-16, schedule("quintic", 5), eps=1e-7)
    torch.testing.assert_close(faded, x * 1e-9 * slope, rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(6, 6), (4, 12)])
def test_a_non_finite_element_makes_its_matrix_nan_and_no_other(
    bad: float, shape: tuple[int, int]
) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3))
    expected = newton_schulz(x, schedule("quintic", 5))
    x[1, 2, 3] = bad
    result = newton_schulz(x, schedule("quintic", 5))
    assert result[1].isnan().all()
    assert torch.equal(result[::2], expected[::2])


def test_input_is_left_alone_and_half_precision_input_is_not_squared() -> None:
    x = torch.full((4, 4), 1e-6, dtype=torch.float16)  # squares underflow in float16
    before = x.clone()
    result = one(x, schedule("quintic", 5))
    assert torch.equal(x, before)
    assert result.dtype == torch.float32
    assert spectral_norm(result) == pytest.approx(1, abs=0.33)


def test_dtype_follows_the_device() -> None:
    assert default_ns_dtype(torch.empty(1, dtype=torch.bfloat16)) == torch.float32
    assert default_ns_dtype(torch.empty(1, dtype=torch.float64)) == torch.float64
    assert default_ns_dtype(torch.empty(1, dtype=torch.float32, device="meta")) == torch.float32


def test_gram_side_only_where_products_are_exact_enough() -> None:
    cpu = torch.device("cpu")
    assert uses_gram(64, 128, torch.float32, cpu)
    assert uses_gram(128, 64, torch.float64, cpu)
    assert not uses_gram(64, 127, torch.float32, cpu)
    assert not uses_gram(64, 128, torch.bfloat16, cpu)
    assert not uses_gram(64, 128, torch.float32, torch.device("cuda"))  # may be TF32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not uses_gram(64, 128, torch.float32, cpu)
    finally:
        torch.set_float32_matmul_precision(before)


class CountProducts(TorchDispatchMode):
    """Counts two operations for each multiply-add of a batched matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            left, right = args[-2:]
            self.flops += 2 * math.prod(left.shape) * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(16, 16), (16, 24), (24, 16), (16, 32), (64, 16)])
@pytest.mark.parametrize(("name", "steps"), [("quintic", 5), ("polar_express", 8), ("quintic", 1)])
def test_flops_are_those_of_the_products_done(
    shape: tuple[int, int], name: str, steps: int
) -> None:
    coefficients = schedule(name, steps)
    gram = uses_gram(*shape, torch.float32, torch.device("cpu"))
    with CountProducts() as counted:
        newton_schulz(torch.ones(1, *shape), coefficients)
    assert counted.flops == newton_schulz_flops(*shape, coefficients, gram=gram)


@pytest.mark.parametrize("aspect", [2, 3, 8])
def test_gram_side_does_less(aspect: int) -> None:
    coefficients = schedule("quintic", 5)
    flops = [newton_schulz_flops(64, 64 * aspect, coefficients, gram=g) for g in (True, False)]
    assert flops[0] < flops[1]
