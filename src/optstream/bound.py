"""A parameter that is updated in this step, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class ScaledGradient(NamedTuple):
    """A gradient of a parameter with a master, to be multiplied in float32 once it is cast.

    Attributes:
        factor: one element: what a loss scale and clipping come to.
    """

    grad: Tensor
    factor: Tensor


GradientOf = Callable[[Tensor], Tensor | ScaledGradient | None]


class Bound(NamedTuple):
    """A parameter that has a gradient in this step.

    Attributes:
        param, grad: this rank's part, if it is sharded.
        whole: the DTensor, where the optimizer takes it together with other ranks.
    """

    param: Tensor
    grad: Tensor
    factor: Tensor | None = None
    whole: Tensor | None = None
