"""Orthogonalise matrices by an odd polynomial iteration: matrix products only, no SVD."""

from __future__ import annotations

import torch
from torch import Tensor

from optstream.muon.coefficients import Triple

# Iterate on the small Gram side from this aspect ratio on; with restarts it costs
# (k - 1)(4 n - 6 m) m^2 operations less per run of k steps, so it would pay from 1.5.
_GRAM_ASPECT = 2

# Product of slopes (a) within one run on the Gram side. A Gram matrix holds squared singular
# values, rounded to eps, and a run multiplies that error by the product squared: 50 keeps it
# within 1.5e-4 in float32. Without restarts ten steps return 1e12 (test_newton_schulz.py).
_RUN_SLOPE = 50.0


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    coefficients: tuple[Triple, ...],
    *,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Map the singular values s of each matrix to p_k(...p_1(s / norm)), near 1 for most s.

    norm is max(Frobenius norm, eps): a matrix smaller than eps fades to zero instead of being
    blown up to full size, and zero stays zero. The norm is taken in at least float32, after
    division by the largest element, so that it neither overflows nor underflows. A matrix with a
    non-finite element becomes NaN throughout; its neighbours in the batch do not.

    Args:
        x: shape (batch, rows, cols), any floating dtype, any device, not changed.
        coefficients: one (a, b, c) per step, from `coefficients.schedule`.
        eps: smallest norm that counts as non-zero, > 0.
        dtype: of the products and of the result; None: `default_ns_dtype` of x.

    Returns:
        A new tensor of x's shape in `dtype`. Temporaries: two of x's size, the result among
        them, and four of (batch, m, m) with m = min(rows, cols).
    Source: Jordan 2024 (`COEFFICIENTS`); iteration on the Gram side with restarts: Zhang, Amsel,
    Chen, Dao, "Gram Newton-Schulz" (2026). Checked by test_newton_schulz.py.
    """
    dtype = dtype or default_ns_dtype(x)
    tall = x.shape[-2] > x.shape[-1]
    wide = _normalise(x.mT if tall else x, eps).to(dtype)
    if uses_gram(x.shape[-2], x.shape[-1], dtype, x.device):
        wide = _on_gram_side(wide, _runs(coefficients))
    else:
        wide = _on_matrix(wide, coefficients, exact=_is_exact(dtype, x.device))
    return wide.mT if tall else wide


def default_ns_dtype(x: Tensor) -> torch.dtype:
    """Float64 for float64, else float32 on a CPU and bfloat16 on an accelerator."""
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32 if x.device.type in ("cpu", "meta") else torch.bfloat16


def uses_gram(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the iteration runs on the small Gram side.

    Only where products are rounded to float32 or better: the 8 bits of bf16, or 11 of TF32, would
    make eigenvalues of the Gram matrix negative enough to diverge.
    """
    return _is_exact(dtype, device) and max(rows, cols) >= _GRAM_ASPECT * min(rows, cols)


def _is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether products are those of float32 or better, without TF32 or the like."""
    return dtype == torch.float64 or (
        dtype == torch.float32
        and device.type in ("cpu", "meta")
        and torch.get_float32_matmul_precision() == "highest"
    )


def newton_schulz_flops(
    rows: int, cols: int, coefficients: tuple[Triple, ...], *, gram: bool
) -> int:
    """Count the multiplications and additions of the products that `newton_schulz` really does."""
    m, n = min(rows, cols), max(rows, cols)
    if not gram:
        return len(coefficients) * (4 * m * m * n + 2 * m**3)
    return sum(4 * m * m * n + (8 * len(run) - 6) * m**3 for run in _runs(coefficients))


def _normalise(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # vector_norm(x, inf) does the same 15 times slower on a CPU (torch 2.13)
    peak = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    peak = peak.clamp_min(torch.finfo(x.dtype).tiny)
    x = x / peak
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div_(torch.maximum(norm, eps / peak))


def _runs(coefficients: tuple[Triple, ...]) -> list[tuple[Triple, ...]]:
    """Cut the steps into runs whose product of slopes stays below `_RUN_SLOPE`."""
    runs: list[tuple[Triple, ...]] = []
    slope = 0.0
    for triple in coefficients:
        slope *= abs(triple[0])
        if not runs or slope > _RUN_SLOPE:
            runs.append(())
            slope = abs(triple[0])
        runs[-1] = (*runs[-1], triple)
    return runs


def _on_matrix(x: Tensor, coefficients: tuple[Triple, ...], *, exact: bool) -> Tensor:
    """Step x by (a I + b R + c R^2) x with R = x x^T, for each triple; overwrites x.

    Args:
        exact: the a may go into the polynomial, which spares a copy of x; where products round
            their factors it would be rounded with them.
    """
    gram, poly, spare = _small(x), _small(x), torch.empty_like(x)
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        if exact:
            poly.diagonal(dim1=-2, dim2=-1).add_(a)
            torch.bmm(poly, x, out=spare)
        else:
            torch.baddbmm(x, poly, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def _on_gram_side(x: Tensor, runs: list[tuple[Triple, ...]]) -> Tensor:
    """Do the same with two products of x's size a run: the polynomials multiply up in `total`."""
    gram, poly, total, other = (_small(x) for _ in range(4))
    spare = torch.empty_like(x)
    for run in runs:
        torch.bmm(x, x.mT, out=gram)
        for i, (a, b, c) in enumerate(run):
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
            poly.diagonal(dim1=-2, dim2=-1).add_(a)
            if i < len(run) - 1:
                torch.bmm(poly, gram, out=other)
                torch.bmm(other, poly, out=gram)
            if i == 0:
                total, poly = poly, total
            else:
                torch.bmm(poly, total, out=other)
                total, other = other, total
        torch.bmm(total, x, out=spare)
        x, spare = spare, x
    return x


def _small(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-2])
