"""Checkpoints of parameters that ranks have in parts: from any form of the model to any other."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optstream
from distributed import forms
from distributed.forms import Whole, differing, of_all, offloaded, state_of, step, weights_of
from distributed.group import Outcome
from optstream.checkpoint.parts import Held
from optstream.distributed.placements import region_of
from optstream.distributed.region import Region
from optstream.errors import RankError

Ranks = Callable[..., list[Any]]
Form = tuple[str, int]
EXACT = {
    "exact": ("adamw", torch.bfloat16),
    "fp32": ("sgd", torch.float32),
    "muon": ("muon", torch.float32),
}
SPLIT = {"split": ("adamw", torch.bfloat16)}
ROUNDED = {"bf16": ("adamw", torch.float32), "int8": ("adamw", torch.float32)}
CASES = {**EXACT, **SPLIT, **ROUNDED}
BEFORE = 2
FEW: list[Form] = [("fsdp", 3), ("replicated", 2)]
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


def entry(path: Path, case: str, weights: Whole) -> tuple[str, str, str]:
    """Keep weights in a file: each tensor that is sent to a process takes a descriptor, of few."""
    file = path.with_name(f"{path.name}.weights")
    torch.save(weights, file)
    return str(path), case, str(file)


def load_in(form: str, root: Path, saved: list[tuple[str, str, str]]) -> list[tuple[Whole, int]]:
    """Load each checkpoint; return what of the whole state is here, and the bytes that moved.

    Args:
        saved: path, case and file of the weights.
    """
    found = []
    for path, case, weights in saved:
        name, dtype = CASES[case]
        model = forms.make_model(form, dtype, seed=1)
        forms.set_weights(model, torch.load(weights))
        with offloaded(name, form, model, root / "loaded", codec=codec(case)) as optimizer:
            optimizer.load(path)
            counters = optimizer._state.stream.counters
            moved_bytes = counters.read_bytes + counters.written_bytes
            found.append((state_of(optimizer, model), moved_bytes))
            step(optimizer, model, BEFORE)
            assert optimizer.report is not None
            assert optimizer.report.step == BEFORE + 1
    return found


def check_pairs(ranks: Ranks, root: Path, among: list[Form], cases: dict[str, Any]) -> None:
    """Save in each form, and load that in each."""
    wanted: dict[tuple[Form, str], Whole] = {}
    saved = []
    for form, size in among:
        directory = root / f"{form}{size}"
        directory.mkdir()
        found = ranks(size, save_in, form, directory, cases)
        for case in cases:
            optstream.verify(directory / case)
            wanted[(form, size), case] = of_all([each[case][1] for each in found])
            saved.append(((form, size), *entry(directory / case, case, found[0][case][0])))
    for form, size in among:
        given = [entry[1:] for entry in saved]
        found = ranks(size, load_in, form, root, given)
        for index, (source, _, case, _) in enumerate(saved):
            state = of_all([each[index][0] for each in found])
            assert differing(state, wanted[source, case]) == [], (source, case, form, size)
            # files are taken as they are; of tp some have replicas beside other shards
            if source == (form, size) and form != "tp":
                assert [each[index][1] for each in found] == [0] * size, (source, case)


def test_from_some_forms_to_others(ranks: Ranks, tmp_path: Path) -> None:
    check_pairs(ranks, tmp_path, FEW, {"muon": CASES["muon"], **SPLIT})


@pytest.mark.slow
def test_from_all_forms_to_all(ranks: Ranks, tmp_path: Path) -> None:
    check_pairs(ranks, tmp_path, ALL, {**EXACT, **SPLIT})


def load_rounded(form: str, root: Path, saved: list[tuple[str, str, str]]) -> Any:
    lines: list[str] = []
    log = logging.getLogger("optstream")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    return load_in(form, root, saved), lines


@pytest.mark.parametrize(("form", "size"), [("tp", 4), ("alone", 1)])
def test_rounded_state_stays_near_and_what_is_rounded_again_is_named(
    ranks: Ranks, tmp_path: Path, form: str, size: int
) -> None:
    found = ranks(3, save_in, "fsdp", tmp_path, ROUNDED)
    saved = [entry(tmp_path / case, case, found[0][case][0]) for case in ROUNDED]
    loaded = ranks(size, load_rounded, form, tmp_path, saved)
    for index, case in enumerate(ROUNDED):
        wanted = of_all([each[case][1] for each in found])
        state = of_all([each[index][0] for each, _ in loaded])
        if case == "bf16":
            assert differing(state, wanted) == []
        for name, value in wanted.items():
            assert (state[name] - value).abs().max() <= 0.02 * value.abs().max(), (case, name)
    for _, lines in loaded:
        again = [line for line in lines if "to other blocks of int8" in line]
        assert len(again) == 2, lines


# -- where parts are


def misplaced(form: str) -> list[str]:
    """Return the parameters whose parts are not where they are said to be."""
    model, full = forms.make_model(form, torch.float32), forms.make_model("alone", torch.float32)
    wrong = []
    for (name, param), values in zip(model.named_parameters(), full.parameters(), strict=True):
        found = Held(Region.whole(values.shape), values).of(region_of(name, param))
        if not torch.equal(found, param.to_local()):  # type: ignore[attr-defined]
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("form", ["fsdp", "hsdp", "tp"])
def test_parts_are_where_they_are_said_to_be(ranks: Ranks, form: str) -> None:
    assert ranks(4, misplaced, form) == [[]] * 4


def test_replicas_are_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(4, save_in, "hsdp", tmp_path, EXACT)
    folders = sorted(path.name for path in (tmp_path / "exact").iterdir() if path.is_dir())
    assert folders == ["rank00000", "rank00001"]  # the first copy's
    weights = found[0]["fp32"][0]
    loaded = ranks(4, load_in, "hsdp", tmp_path, [entry(tmp_path / "fp32", "fp32", weights)])
    wanted = of_all([each["fp32"][1] for each in found])
    assert differing(of_all([each[0][0] for each in loaded]), wanted) == []
    assert [each[0][1] for each in loaded] == [0] * 4


# -- what goes wrong


def refused(root: Path) -> dict[str, str]:
    """Return what is said of saves and loads that cannot be."""
    said = {}
    model = forms.make_model("fsdp", torch.float32)
    with offloaded("adamw", "alone", model, root / "alone") as optimizer:
        step(optimizer, model, 0)
        said["no group"] = message(lambda: optimizer.save(root / "checkpoint"))
        given = optimizer.state_dict()
    with offloaded("adamw", "fsdp", model, root / "state") as optimizer:
        step(optimizer, model, 0)
        optimizer._state.records[0].kept["step"] += dist.get_rank()
        said["step"] = message(lambda: optimizer.save(root / "checkpoint"))
    turned = forms.make_model("tp", torch.float32)
    with offloaded("adamw", "tp", turned, root / "state") as optimizer:
        said["placements"] = message(lambda: optimizer.load_state_dict(given))
    alone = forms.make_model("replicated", torch.float32)
    with offloaded("adamw", "replicated", alone, root / "state") as optimizer:
        said["replicated"] = message(lambda: optimizer.load_state_dict(given))
    assert not (root / "checkpoint").exists()
    return said


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except optstream.OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_cannot_be_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(4, refused, tmp_path):
        assert "process_group= must have all ranks" in said["no group"], said
        assert "the shards of embedding.weight have other counters" in said["step"], said
        assert "full_state_dict=True" in said["placements"], said
        assert "full_state_dict=True" in said["replicated"], said


def save_and_die(root: Path, dying: int) -> None:
    """Save twice; in the second save one rank is killed."""
    model = forms.make_model("fsdp", torch.float32)
    optimizer = offloaded("adamw", "fsdp", model, root / "state")
    step(optimizer, model, 0)
    optimizer.save(root / "checkpoint")
    step(optimizer, model, 1)
    if dist.get_rank() == dying:
        os.link = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(RankError):
        optimizer.save(root / "checkpoint")


def test_a_rank_that_dies_leaves_the_checkpoint_before(
    outcomes: Callable[..., list[Outcome]], tmp_path: Path
) -> None:
    found = outcomes(2, save_and_die, tmp_path, 1)
    assert found[0].error is None, found[0].trace
    optstream.verify(tmp_path / "checkpoint")
    model = forms.make_model("alone", torch.float32)
    with offloaded("adamw", "alone", model, tmp_path / "alone") as optimizer:
        optimizer.load(tmp_path / "checkpoint")
        step(optimizer, model, 1)
        assert optimizer.report is not None
        assert optimizer.report.step == 2
