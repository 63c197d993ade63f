"""Slow references in float64, independent of the product: singular values, not iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

Triple = tuple[float, float, float]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices, several workers: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def polynomial() -> Callable[[Tensor, tuple[Triple, ...]], Tensor]:
    """p_k(...p_1(s)) of a vector."""

    def evaluate(s: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
        for a, b, c in coefficients:
            s = a * s + b * s**3 + c * s**5
        return s

    return evaluate


@pytest.fixture
def reference(
    polynomial: Callable[[Tensor, tuple[Triple, ...]], Tensor],
) -> Callable[[Tensor, tuple[Triple, ...]], Tensor]:
    """U p(S / norm) V^T by singular value decomposition in float64."""

    def orthogonalise(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
        u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
        return (u * polynomial(s / torch.linalg.vector_norm(s), coefficients)) @ vh

    return orthogonalise


@pytest.fixture
def with_spectrum() -> Callable[[int, int, Tensor], Tensor]:
    """A float64 (rows, cols) matrix with given singular values and random singular vectors."""

    def build(rows: int, cols: int, singular_values: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(rows * 1000 + cols)

        def basis(size: int) -> Tensor:
            square = torch.randn(size, size, dtype=torch.float64, generator=generator)
            return torch.linalg.qr(square).Q[:, : len(singular_values)]

        return (basis(rows) * singular_values.double()) @ basis(cols).T

    return build
