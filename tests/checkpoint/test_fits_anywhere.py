"""Another window size, directory, store or order of parameters; to and from the plain optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optstream
from checkpoint.runs import (
    SHAPES,
    adamw,
    after,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from parity.cases import MasterLoop, make_params

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": "16MiB"},
        {"window": "200KiB"},
        {"store": "memory"},
        {"store": "mapped"},
        {"store": "mapped", "window": "100KiB", "directories": 2},
        {"directories": 2},
        {"window": "100KiB", "directories": 3},
    ],
    ids=str,
)
def test_another_layout_and_back(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    options = dict(options)
    number = options.pop("directories", 1)
    other = [tmp_path / f"other{i}" for i in range(number)]
    params, optimizer = streamed(tmp_path / "a", dtype=dtype)
    with optimizer:
        go_on(params, optimizer, range(3))
        optimizer.save(tmp_path / "one")
    moved, optimizer = streamed(other, dtype=dtype, seed=1, **options)  # type: ignore[arg-type]
    with optimizer:
        set_weights(moved, weights(params))
        optimizer.load(tmp_path / "one")
        go_on(moved, optimizer, range(3, 5))
        optimizer.save(tmp_path / "two")
    back, optimizer = streamed(tmp_path / "a", dtype=dtype, seed=2)
    with optimizer:
        set_weights(back, weights(moved))
        optimizer.load(tmp_path / "two")
        go_on(back, optimizer, range(5, 7))
    assert_same_bits(weights(back), after(7, dtype))
    optstream.verify(tmp_path / "one")
    optstream.verify(tmp_path / "two")


class Model(nn.Module):
    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        shapes = dict(zip("abcdef", SHAPES, strict=True))
        values = dict(zip("abcdef", make_params(SHAPES), strict=True))
        for name in order:
            assert values[name].shape == shapes[name]
            self.register_parameter(name, values[name])


def by_name(model: Model) -> list[torch.Tensor]:
    return [getattr(model, name) for name in "abcdef"]


@pytest.mark.parametrize("how", ["save", "state_dict"])
def test_another_order_of_parameters_is_followed_by_name(how: str, tmp_path: Path) -> None:
    def wrapped(order: str) -> tuple[Model, optstream.StreamedOptimizer]:
        model = Model(order)
        named = torch.optim.AdamW(list(model.named_parameters()), lr=0.01, foreach=False)
        return model, optstream.offload(named, tmp_path / order, model=model, window="64KiB")

    first, optimizer = wrapped("abcdef")
    second, resumed = wrapped("fbdaec")
    with optimizer, resumed:
        go_on(by_name(first), optimizer, range(3))  # type: ignore[arg-type]
        set_weights(by_name(second), by_name(first))  # type: ignore[arg-type]
        if how == "save":
            optimizer.save(tmp_path / "checkpoint")
            resumed.load(tmp_path / "checkpoint")
        else:
            resumed.load_state_dict(optimizer.state_dict())
        go_on(by_name(second), resumed, range(3, 6))  # type: ignore[arg-type]
        assert resumed.param_groups[0]["param_names"] == list("fbdaec")
    assert_same_bits(by_name(second), after(6))


@pytest.mark.parametrize("store", ["direct", "memory"])
def test_to_the_plain_optimizer_and_back(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path, store=store)
    with optimizer:
        go_on(params, optimizer, range(3))
        plain_params = make_params(SHAPES, seed=1)
        set_weights(plain_params, weights(params))
        plain = adamw(plain_params)
        # torch takes tensors over as they are: its own are copies here
        given = optimizer.state_dict()
        plain.load_state_dict(given)
        go_on(plain_params, plain, range(3, 6))
        set_weights(params, weights(plain_params))
        optimizer.load_state_dict(plain.state_dict())
        assert_same_state(copied(optimizer.state_dict()), copied(plain.state_dict()))
        go_on(params, optimizer, range(6, 8))
    assert_same_bits(weights(params), after(8))


def test_masters_come_from_a_master_loop_and_go_back(tmp_path: Path) -> None:
    """A plain loop over float32 masters holds what streaming keeps for bfloat16 parameters."""
    params, optimizer = streamed(tmp_path, dtype=BF16)
    with optimizer:
        go_on(params, optimizer, range(3))
        given = optimizer.state_dict()
        loop_params = make_params(SHAPES, BF16, seed=1)
        loop = MasterLoop(lambda masters: adamw(masters), loop_params)
        masters = [state.pop("master") for state in given["state"].values()]
        set_weights(loop.masters, masters)
        set_weights(loop_params, weights(params))
        loop.optimizer.load_state_dict(given)
        go_on(loop_params, loop, range(3, 6))
        back = loop.optimizer.state_dict()
        for state, master in zip(back["state"].values(), loop.masters, strict=True):
            state["master"] = master.detach()
        set_weights(params, weights(loop_params))
        optimizer.load_state_dict(back)
        go_on(params, optimizer, range(6, 8))
    assert_same_bits(weights(params), after(8, BF16))


def test_a_missing_master_is_made_from_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params, optimizer = streamed(tmp_path, dtype=BF16)
    plain_params = make_params(SHAPES, BF16)
    plain = adamw(plain_params)
    go_on(plain_params, plain, range(2))
    with optimizer:
        set_weights(params, weights(plain_params))
        optimizer.load_state_dict(plain.state_dict())
        assert "widened to float32: 'group0.param0'/exp_avg" in caplog.text
        go_on(params, optimizer, [2])
        state = optimizer.state_dict()["state"]
    loop_params = make_params(SHAPES, BF16)
    set_weights(loop_params, weights(plain_params))
    loop = MasterLoop(lambda masters: adamw(masters), loop_params)
    loop.optimizer.load_state_dict(plain.state_dict())  # casts to the masters' float32
    go_on(loop_params, loop, [2])
    assert_same_bits(weights(params), weights(loop_params))
    assert_same_bits([s["master"] for s in state.values()], [m.detach() for m in loop.masters])


def test_memory_and_masters_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Masters that nobody wants are an error that names them, and a warning where allowed."""
    params, optimizer = streamed(tmp_path / "a", dtype=BF16)
    _, plain = streamed(tmp_path / "b", dtype=BF16, master_weights=False)
    with optimizer, plain:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        with pytest.raises(optstream.OffloadError, match=r"'group0.param0'/exp_avg \(torch.float"):
            plain.load(tmp_path / "checkpoint")
        with pytest.raises(optstream.OffloadError, match=r"'group0.param0'/exp_avg \(torch.float"):
            plain.load_state_dict(optimizer.state_dict())
        narrow = optimizer.state_dict()
        for state in narrow["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16()
        with pytest.raises(optstream.OffloadError, match=r"has 'group0.param0'/master, 'group0."):
            plain.load_state_dict(narrow)
        caplog.set_level(logging.WARNING)
        plain.load_state_dict(narrow, strict=False)
        assert "'group0.param0'/master" in caplog.text
        assert "master" not in plain.state_dict()["state"][0]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_load_over_state_of_a_longer_run(dtype: torch.dtype, tmp_path: Path) -> None:
    """What the optimizer had before leaves nothing behind, nor does what it had in slots."""
    params, optimizer = streamed(tmp_path / "a", dtype=dtype)
    with optimizer:
        go_on(params, optimizer, range(3))
        optimizer.save(tmp_path / "early")
        early, early_dict = weights(params), optimizer.state_dict()
        for load in (
            lambda: optimizer.load_state_dict(early_dict),
            lambda: optimizer.load(tmp_path / "early"),
            lambda: optimizer.load_state_dict(early_dict),
        ):
            go_on(params, optimizer, range(3, 6))
            set_weights(params, early)
            load()
            assert_same_state(copied(optimizer.state_dict()), copied(early_dict))
        go_on(params, optimizer, range(3, 6))
        found = copied(optimizer.state_dict())
    reference, other = streamed(tmp_path / "b", dtype=dtype, store="memory")
    with other:
        go_on(reference, other, range(6))
        assert_same_state(found, copied(other.state_dict()))
    assert_same_bits(weights(params), after(6, dtype))
