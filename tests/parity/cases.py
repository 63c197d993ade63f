"""Optimizers, models and the plain loops that a streamed run is compared with, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream

LOW_PRECISION = (torch.bfloat16, torch.float16)
NUM_STEPS = 10
PLACES = (("direct", "64KiB"), ("memory", "200KiB"), ("direct", "16MiB"))
"""Stores and windows: the smallest there is, one that cuts in odd places, one above the models."""

SHAPES = ((90, 130), (7,), (2, 4099), (7,), (90, 130))
MATRICES = ((64, 72), (24, 40), (64, 72), (64, 72))


@dataclass(frozen=True)
class Case:
    """One way to configure one optimizer class."""

    name: str
    cls: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def make(self, params: Any, **more: Any) -> Optimizer:
        return self.cls(params, **{**self.options, **more})

    def __str__(self) -> str:
        return self.name


_FUSED_ON_CPU = ("SGD", "Adam", "AdamW", "Adagrad")
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        "": {"lr": 0.1},
        "momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
        "nesterov-decay": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    },
    "Adam": {"": {"lr": 0.01}, "amsgrad": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}},
    "AdamW": {"": {"lr": 0.01}, "amsgrad": {"lr": 0.01, "amsgrad": True, "maximize": True}},
    "NAdam": {"": {}, "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True}},
    "RAdam": {"": {"weight_decay": 0.01}},
    "Adamax": {"": {"weight_decay": 0.01}},
    "Adadelta": {"": {"weight_decay": 0.01}},
    "Adagrad": {"": {"lr_decay": 0.1}, "initial": {"initial_accumulator_value": 0.125}},
    "RMSprop": {"": {}, "centered-momentum": {"centered": True, "momentum": 0.9}},
    "Rprop": {"": {}},
    "ASGD": {"": {"lambd": 1e-2, "t0": 3}},
    "Adafactor": {"": {"weight_decay": 0.01}},
    "Muon": {"": {"ns_steps": 2}, "plain-momentum": {"nesterov": False, "ns_steps": 1}},
}


def _implementations(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if name == "Muon":
        yield "", {}
        return
    yield "for", {"foreach": False}
    yield "foreach", {"foreach": True}
    if name in _FUSED_ON_CPU:
        yield "fused", {"fused": True}


def torch_cases(*names: str) -> list[Case]:
    """Return every configuration of these torch optimizers, of all by default."""
    return [
        Case(
            "-".join(part for part in (name, variant, implementation) if part),
            getattr(torch.optim, name),
            {**options, **how},
            MATRICES if name == "Muon" else SHAPES,
        )
        for name in names or _OPTIONS
        for variant, options in _OPTIONS[name].items()
        for implementation, how in _implementations(name)
    ]


def make_params(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(_randn(shape, dtype, generator)) for shape in shapes]


def set_grads(params: Iterable[Tensor], step: int) -> None:
    """Give every parameter the gradient that belongs to this step, the same in every run."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        values = _randn(param.shape, param.dtype, generator).mul_(10.0 ** (index % 3 - 1))
        # laid out like the parameter, as autograd does it
        param.grad = torch.empty_like(param, requires_grad=False).copy_(values)


def _randn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(tuple(shape), generator=generator, dtype=drawn).to(dtype)


class MasterLoop:
    """The textbook loop for low precision: a plain optimizer over float32 masters.

    Attributes:
        optimizer: of the masters; parameters of other dtypes are their own masters.
    """

    def __init__(self, make: Callable[[Any], Optimizer], params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.masters = [
            nn.Parameter(p.detach().float()) if p.dtype in LOW_PRECISION else p for p in params
        ]
        self.optimizer = make(self.masters)
        self.param_groups = self.optimizer.param_groups

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if master is not param and master.grad is not None:
                    param.copy_(master)


def train(
    params: Sequence[nn.Parameter], optimizer: Any, steps: Iterable[int] = range(NUM_STEPS)
) -> None:
    """Step with known gradients; the learning rate changes on the way, as schedulers do."""
    for step in steps:
        set_grads(params, step)
        if step == NUM_STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        optimizer.step()


@functools.cache
def _reference(
    key: tuple[str, torch.dtype, tuple[tuple[int, ...], ...]], case: _Hashable
) -> list[Tensor]:
    _, dtype, shapes = key
    params = make_params(shapes, dtype)
    train(params, MasterLoop(case.case.make, params))
    return [param.detach() for param in params]


class _Hashable:
    """A case as an argument of a cached function; equal to any other, its name is in the key."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable)


def reference(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Return the parameters after the plain run."""
    return _reference((case.name, dtype, case.shapes), _Hashable(case))


def check_case(case: Case, dtype: torch.dtype, directory: Path, **options: Any) -> None:
    """Compare a streamed run of a case with the plain one.

    Args:
        options: of `offload`.
    """
    params = make_params(case.shapes, dtype)
    with optstream.offload(case.make(params), directory, **options) as optimizer:
        train(params, optimizer)
    assert_same_bits(params, reference(case, dtype))


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in which a NaN equals itself and -0.0 is not 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert left.shape == right.shape
        assert left.dtype == right.dtype
        different = int((bits(left) != bits(right)).sum())
        assert different == 0, f"tensor {index}: {different} of {bits(left).numel()} bytes differ"
