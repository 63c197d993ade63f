"""Saved on so many ranks, loaded on so many others; one manifest; a rank that dies in a save."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optstream
from distributed.group import Outcome
from distributed.programs import (
    MAKES,
    copies,
    differing,
    make_model,
    offloaded,
    plain_steps,
    set_gradients,
)
from optstream.errors import RankError

CASES = [("adamw", torch.bfloat16), ("muon", torch.float32)]
BEFORE, AFTER = 2, 2


def alone(name: str, model: torch.nn.Module, directory: Path) -> optstream.StreamedOptimizer:
    return optstream.offload(MAKES[name](model), directory, model=model, window="64KiB")


def step(optimizer: Any, model: torch.nn.Module, number: int) -> None:
    set_gradients(list(model.parameters()), number)
    optimizer.step()


def save_all(root: Path) -> list[dict[str, Any]]:
    """Train, save, and return the model's weights, which a program saves itself."""
    weights = []
    for name, dtype in CASES:
        model = make_model(dtype)
        with offloaded(MAKES[name], model, root / "state") as optimizer:
            for number in range(BEFORE):
                step(optimizer, model, number)
            saving = optimizer.save(root / name, wait=False)
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            step(optimizer, model, 50)  # what follows is not part of it
            saving.wait()
    return weights


def load_all(root: Path, weights: list[dict[str, Any]], window: str) -> list[Any]:
    """Go on from the checkpoints; return parameters, steps and the bytes that a load moved."""
    results = []
    for (name, dtype), values in zip(CASES, weights, strict=True):
        model = make_model(dtype, seed=1)
        model.load_state_dict(values)
        with offloaded(MAKES[name], model, root / "resumed", window=window) as optimizer:
            optimizer.load(root / name)
            counters = optimizer._state.stream.counters
            moved_bytes = counters.read_bytes + counters.written_bytes
            for number in range(BEFORE, BEFORE + AFTER):
                step(optimizer, model, number)
            assert optimizer.report is not None
            results.append((copies(model), optimizer.report.step, moved_bytes))
    return results


def expected(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return list(plain_steps(MAKES[name], make_model(dtype), BEFORE + AFTER))[-1]


@pytest.mark.parametrize(
    "saved_on", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))]
)
def test_any_number_of_ranks_loads_what_any_number_saved(
    saved_on: int, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights = ranks(saved_on, save_all, tmp_path)[0]
    for name, _ in CASES:
        optstream.verify(tmp_path / name)
        folders = sorted(path.name for path in (tmp_path / name).iterdir() if path.is_dir())
        assert folders == [f"rank{rank:05d}" for rank in range(saved_on)]
    for loaded_on in (1, 2, 3, 4):
        window = "64KiB" if loaded_on != 3 else "96KiB"
        for results in ranks(loaded_on, load_all, tmp_path, weights, window):
            for (name, dtype), (found, steps, moved_bytes) in zip(CASES, results, strict=True):
                assert differing(found, expected(name, dtype)) == [], (name, loaded_on)
                assert steps == BEFORE + AFTER
                if loaded_on == saved_on and window == "64KiB":
                    assert moved_bytes == 0  # its files are taken as they are


def test_one_process_and_the_plain_optimizer_load_it(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights = ranks(3, save_all, tmp_path)[0]
    for (name, dtype), values in zip(CASES, weights, strict=True):
        model = make_model(dtype, seed=1)
        model.load_state_dict(values)
        with alone(name, model, tmp_path / "alone") as optimizer:
            optimizer.load(tmp_path / name)
            for number in range(BEFORE, BEFORE + AFTER):
                step(optimizer, model, number)
        assert differing(copies(model), expected(name, dtype)) == []


def load_plain(root: Path, values: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    model = make_model(torch.float32, seed=1)
    model.load_state_dict(values)
    with offloaded(MAKES["adamw"], model, root / "state") as optimizer:
        optimizer.load_state_dict(state)
        for number in range(BEFORE, BEFORE + AFTER):
            step(optimizer, model, number)
        with pytest.raises(optstream.OffloadError, match=r"on \d ranks.*save\(\)"):
            optimizer.state_dict()
    return copies(model)


def test_ranks_take_the_state_of_a_plain_optimizer(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    model = make_model(torch.float32)
    plain = MAKES["adamw"](model)
    for number in range(BEFORE):
        step(plain, model, number)
    given = (tmp_path, model.state_dict(), plain.state_dict())
    for found in ranks(2, load_plain, *given):
        assert differing(found, expected("adamw", torch.float32)) == []


def save_and_die(root: Path, dying: int, call: str) -> Any:
    """Save twice; in the second save one rank is killed at a call."""
    model = make_model()
    optimizer = offloaded(MAKES["adamw"], model, root / "state")
    step(optimizer, model, 0)
    optimizer.save(root / "checkpoint")
    before = copies(model)
    step(optimizer, model, 1)
    if dist.get_rank() == dying:
        setattr(os, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankError):
        optimizer.save(root / "checkpoint")
    return before


@pytest.mark.parametrize(("dying", "call"), [(0, "link"), (1, "link"), (1, "fsync")])
def test_a_rank_that_dies_leaves_the_checkpoint_before(
    dying: int, call: str, outcomes: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    found = outcomes(2, save_and_die, tmp_path, dying, call)
    assert found[1 - dying].error is None, found[1 - dying].trace
    optstream.verify(tmp_path / "checkpoint")
    model = make_model()
    with alone("adamw", model, tmp_path / "alone") as optimizer:
        optimizer.load(tmp_path / "checkpoint")
        step(optimizer, model, 1)
        assert optimizer.report is not None
        assert optimizer.report.step == 2
        optimizer.save(tmp_path / "checkpoint")  # what the dead one left is in nobody's way


def save_where_one_cannot(root: Path) -> str:
    model = make_model()
    with offloaded(MAKES["adamw"], model, root / "state") as optimizer:
        step(optimizer, model, 0)
        if dist.get_rank() == 1:

            def refuse(*_: object, **__: object) -> None:
                raise OSError(5, "Input/output error")

            os.link, link = refuse, os.link
        with pytest.raises(optstream.OffloadError) as error:
            optimizer.save(root / "checkpoint")
        assert not (root / "checkpoint").exists()
        if dist.get_rank() == 1:
            os.link = link
        step(optimizer, model, 1)
        optimizer.save(root / "checkpoint")
    return str(error.value)


def test_what_fails_on_one_rank_fails_on_all_and_can_be_done_again(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = ranks(2, save_where_one_cannot, tmp_path)
    assert "cannot link" in second
    assert "rank 1 failed: cannot link" in first
    optstream.verify(tmp_path / "checkpoint")
