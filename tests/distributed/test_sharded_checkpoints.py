"""Checkpoints of parameters that ranks have in parts: from any form of the model to any other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optstream
from distributed import forms
from distributed.forms import Whole, differing, of_all, offloaded, state_of, step, weights_of
from distributed.programs import MAKES

Ranks = Callable[..., list[Any]]
Form = tuple[str, int]
EXACT = {"exact": ("adamw", torch.bfloat16), "fp32": ("sgd", torch.float32)}
SPLIT = {"split": ("adamw", torch.bfloat16)}
CASES = {**EXACT, **SPLIT}
BEFORE = 2
FEW: list[Form] = [("fsdp", 3), ("replicated", 2), ("tp", 4)]
ALL: list[Form] = [
    ("alone", 1),
    *((form, size) for form in ("replicated", "fsdp") for size in (1, 2, 3, 4)),
    ("hsdp", 4),
    ("tp", 4),
]


def codec(case: str) -> str:
    return case if case in ("split", "bf16", "int8") else "exact"


def save_in(form: str, root: Path, cases: dict[str, Any]) -> dict[str, tuple[Whole, Whole]]:
    """Train and save; return the weights and what of the whole state is here."""
    found = {}
    for case, (name, dtype) in cases.items():
        model = forms.make_model(form, dtype)
        with offloaded(name, form, model, root / "state", codec=codec(case)) as optimizer:
            for number in range(BEFORE):
                step(optimizer, model, number)
            saving = optimizer.save(root / case, wait=False)
            found[case] = weights_of(model), state_of(optimizer, model)
            step(optimizer, model, 50)  # what follows is not part of it
            saving.wait()
    return found


def load_in(form: str, root: Path, saved: list[tuple[str, str, Whole]]) -> list[tuple[Whole, int]]:
    """Load each checkpoint; return what of the whole state is here, and the bytes that were read.

    Args:
        saved: path, case and weights.
    """
    found = []
    for path, case, weights in saved:
        name, dtype = CASES[case]
        model = forms.make_model(form, dtype, seed=1)
        forms.set_weights(model, weights)
        with offloaded(name, form, model, root / "loaded", codec=codec(case)) as optimizer:
            optimizer.load(path)
            read_bytes = optimizer._state.stream.counters.read_bytes
            found.append((state_of(optimizer, model), read_bytes))
            step(optimizer, model, BEFORE)
            assert optimizer.report is not None
            assert optimizer.report.step == BEFORE + 1
    return found


def check_pairs(ranks: Ranks, root: Path, saved_in: list[Form], loaded_in: list[Form]) -> None:
    wanted: dict[tuple[Form, str], Whole] = {}
    saved = []
    for form, size in saved_in:
        directory = root / f"{form}{size}"
        directory.mkdir()
        found = ranks(size, save_in, form, directory, CASES)
        for case in CASES:
            optstream.verify(directory / case)
            wanted[(form, size), case] = of_all([each[case][1] for each in found])
            saved.append(((form, size), str(directory / case), case, found[0][case][0]))
    for form, size in loaded_in:
        given = [entry[1:] for entry in saved]
        found = ranks(size, load_in, form, root, given)
        for index, (source, _, case, _) in enumerate(saved):
            state = of_all([each[index][0] for each in found])
            assert differing(state, wanted[source, case]) == [], (source, case, form, size)
            if source == (form, size):  # files are taken as they are
                assert [each[index][1] for each in found] == [0] * size, (source, case)


def test_from_some_forms_to_others(ranks: Ranks, tmp_path: Path) -> None:
    check_pairs(ranks, tmp_path, FEW, FEW)


@pytest.mark.slow
def test_from_all_forms_to_all(ranks: Ranks, tmp_path: Path) -> None:
    check_pairs(ranks, tmp_path, ALL, ALL)
