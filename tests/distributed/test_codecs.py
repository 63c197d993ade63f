"""Encoded state on ranks: the bits of one process, whoever keeps what; loaded on other numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optstream
from distributed.programs import (
    MAKES,
    copies,
    differing,
    make_model,
    offloaded,
    plain_steps,
    set_gradients,
)

CASES = [
    *("adamw-split", "adamw-int8"),
    *("muon-split", "muon-bf16", "muon-bf16-stochastic", "muon-int8"),
]
BEFORE, AFTER = 2, 1


def wrapped(case: str, model: torch.nn.Module, directory: Path, window: str) -> Any:
    """Return the optimizer and codec that a case names; without ranks, one process."""
    name, _, codec = case.partition("-")
    group = dist.group.WORLD if dist.is_initialized() else None
    return offloaded(MAKES[name], model, directory, codec=codec, process_group=group, window=window)


def steps(optimizer: Any, model: torch.nn.Module, numbers: range) -> None:
    for number in numbers:
        set_gradients(list(model.parameters()), number)
        optimizer.step()


def train_all(root: Path, window: str = "64KiB") -> dict[str, Any]:
    """Train with each codec, save half-way; return the weights then and in the end."""
    found = {}
    for case in CASES:
        model = make_model(torch.bfloat16)
        with wrapped(case, model, root / "state", window) as optimizer:
            steps(optimizer, model, range(BEFORE))
            optimizer.save(root / case)
            half = {key: value.clone() for key, value in model.state_dict().items()}
            steps(optimizer, model, range(BEFORE, BEFORE + AFTER))
            assert optimizer.report.num_windows > 1
            found[case] = half, copies(model)
    return found


def resume_all(root: Path, weights: dict[str, Any], window: str = "64KiB") -> dict[str, Any]:
    """Go on from each checkpoint; return the weights in the end."""
    found = {}
    for case, (half, _) in weights.items():
        model = make_model(torch.bfloat16, seed=1)
        model.load_state_dict(half)
        with wrapped(case, model, root / "resumed", window) as optimizer:
            optimizer.load(root / case)
            steps(optimizer, model, range(BEFORE, BEFORE + AFTER))
            found[case] = copies(model)
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return where one process saved, and what it came to, in other windows than the ranks'."""
    root = tmp_path_factory.mktemp("alone")
    return root, train_all(root, "96KiB")


def test_ranks_have_the_bits_of_one_process(
    ranks: Callable[..., list[Any]], tmp_path: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    _, expected = one_process
    by_rank = ranks(2, train_all, tmp_path)
    for found in by_rank:
        for case, (_, weights) in expected.items():
            assert differing(found[case][1], weights) == [], case
    for name in ("adamw", "muon"):
        *_, plain = plain_steps(MAKES[name], make_model(torch.bfloat16), BEFORE + AFTER)
        assert differing(expected[f"{name}-split"][1], plain) == []
        assert differing(expected[f"{name}-int8"][1], plain) != []
    resumed = resume_all(tmp_path, by_rank[0])  # saved on two, loaded on one
    for case, (_, weights) in expected.items():
        assert differing(resumed[case], weights) == [], case


def test_what_one_process_saved_goes_on_on_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    root, expected = one_process
    for case in expected:
        (tmp_path / case).symlink_to(root / case)
    for found in ranks(2, resume_all, tmp_path, expected):
        for case, (_, weights) in expected.items():
            assert differing(found[case], weights) == [], case


def mixed_up(root: Path) -> None:
    """Load split masters beside weights they were not saved with."""
    model = make_model(torch.bfloat16, seed=1)
    with wrapped("adamw-split", model, root / "resumed", "64KiB") as optimizer:
        optimizer.load(root / "adamw-split")


def test_other_weights_are_named_on_every_rank(
    outcomes: Callable[..., list[Any]], tmp_path: Path, one_process: tuple[Path, dict[str, Any]]
) -> None:
    (tmp_path / "adamw-split").symlink_to(one_process[0] / "adamw-split")
    for outcome in outcomes(2, mixed_up, tmp_path):
        assert "are split from other weights than the model has" in outcome.error


def test_ranks_must_ask_for_the_same_codec(
    outcomes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for outcome in outcomes(2, different_codecs, tmp_path):
        assert "RankError" in outcome.error
        assert "codec" in outcome.error


def different_codecs(root: Path) -> None:
    wrapped(
        "adamw-int8" if dist.get_rank() else "adamw-bf16", make_model(torch.bfloat16), root, "64KiB"
    )


def test_verify_knows_them(one_process: tuple[Path, dict[str, Any]]) -> None:
    root, expected = one_process
    for case in expected:
        optstream.verify(root / case)
