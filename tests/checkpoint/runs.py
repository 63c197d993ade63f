"""Runs that stop, are saved and go on; and the runs without a stop that they must equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream
from optstream.optimizer import StreamedOptimizer
from parity.cases import assert_same_bits, bits, make_params, set_grads

SHAPES = ((90, 130), (7,), (2, 4099), (), (0, 3), (90, 130))
Flat = dict[str, Tensor | Any]


def go_on(params: Sequence[nn.Parameter], optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def adamw(params: Sequence[nn.Parameter], **options: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=False, **options)


def streamed(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    seed: int = 0,
    kind: Any = adamw,
    **options: Any,
) -> tuple[list[nn.Parameter], StreamedOptimizer]:
    """Return parameters and their streamed optimizer (AdamW, small windows)."""
    params = make_params(shapes, dtype, seed)
    return params, optstream.offload(kind(params), directory, **{"window": "64KiB", **options})


def set_weights(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def weights(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def after(num_steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """Return the weights of a run in memory that never stopped."""
    params = make_params(options.pop("shapes", SHAPES), dtype)
    kind = options.pop("kind", adamw)
    with optstream.offload(kind(params), ".", store="memory", **options) as optimizer:
        go_on(params, optimizer, range(num_steps))
    return weights(params)


def copied(state_dict: dict[str, Any]) -> Flat:
    """Return every state value of a state_dict, tensors as copies, by "id/key"."""
    return {
        f"{identity}/{key}": value.clone() if isinstance(value, Tensor) else value
        for identity, state in state_dict["state"].items()
        for key, value in state.items()
    }


def assert_same_state(actual: Flat, expected: Flat) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert actual[name].shape == value.shape, name
            assert torch.equal(bits(actual[name]), bits(value)), name
        else:
            assert actual[name] == value, name


__all__ = [
    "SHAPES",
    "adamw",
    "after",
    "assert_same_bits",
    "assert_same_state",
    "copied",
    "go_on",
    "set_weights",
    "streamed",
    "weights",
]
