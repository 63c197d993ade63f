"""Sharded parameters and runs without offload: state_dict, torch's own checkpoints, exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import optstream
from distributed import forms
from distributed.forms import Whole, differing, of_all, offloaded, state_of, step, weights_of
from distributed.programs import MAKES
from optstream.cli.main import main

Ranks = Callable[..., list[Any]]
STEPS = 2


def save(root: Path) -> Whole:
    """Save the state of a model on a mesh of 2 x 2; return what of it is here."""
    model = forms.make_model("tp", torch.bfloat16)
    with offloaded("adamw", "tp", model, root / "state") as optimizer:
        for number in range(STEPS):
            step(optimizer, model, number)
        optimizer.save(root / "checkpoint")
        return state_of(optimizer, model)


def exported(path: Path, target: Path) -> Whole:
    """Return the state that an export has for the plain optimizer, and its masters."""
    assert main(["export", str(path), str(target)]) == 0
    given = torch.load(target, weights_only=True)
    names = [name for name, _ in forms.make_model("alone", torch.float32).named_parameters()]
    states = {names[index]: values for index, values in given["state"].items()}
    masters = {f"{name}/master": value for name, value in given.get("masters", {}).items()}
    return {**by_key(states), **masters}


def by_key(states: dict[str, Any]) -> Whole:
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, values in states.items()
        for key, value in values.items()
    }


def load_plain(form: str, root: Path, given: Any) -> Whole:
    """Give the plain optimizer's whole state to the streamed one; return what of it is here."""
    model = forms.make_model(form, torch.float32)
    with offloaded("adamw", form, model, root / "state") as optimizer:
        optimizer.load_state_dict(given)
        return state_of(optimizer, model)


def test_to_and_from_one_plain_optimizer(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = of_all(ranks(4, save, tmp_path))
    assert differing(exported(tmp_path / "checkpoint", tmp_path / "all.pt"), wanted) == []
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "checkpoint"), "--json"]) == 0
    states = json.loads(capsys.readouterr().out)["params"]["down.weight"]["states"]
    shards = [shard["shape"] for shard in states["exp_avg"]["shards"]]
    assert shards == [[33, 48]] * 4
    model = forms.make_model("alone", torch.float32)
    plain = MAKES["adamw"](model)
    for number in range(STEPS):
        step(plain, model, number)
    names = [name for name, _ in model.named_parameters()]
    given = plain.state_dict()
    wanted = by_key({names[index]: values for index, values in given["state"].items()})
    for form in ("fsdp", "tp"):
        found = of_all(ranks(4, load_plain, form, tmp_path, given))
        assert differing(found, wanted) == []


def through_dcp(root: Path, form: str, flat: bool) -> list[str]:
    """Save with offload, go on without; save without, go on with; return what differs."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    wrong = []
    for first, second in (("streamed", "plain"), ("plain", "streamed")):
        path = root / f"{first}-{flat}"
        model, optimizer = made(first, form, root)
        for number in range(STEPS):
            step(optimizer, model, number)
        given = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"optimizer": given}, checkpoint_id=path)
        weights = weights_of(model)
        resumed, other = made(second, form, root)
        forms.set_weights(resumed, weights)
        target = get_optimizer_state_dict(resumed, other, options=options)
        dcp.load({"optimizer": target}, checkpoint_id=path)
        set_optimizer_state_dict(resumed, other, target, options=options)
        forms.set_weights(resumed, weights)
        for trained, of in ((model, optimizer), (resumed, other)):
            step(of, trained, STEPS)
        wrong += differing(weights_of(model), weights_of(resumed))
        wrong += differing(state_of(optimizer, model), state_of(other, resumed))
        wrong += [f"step {first}"] if differing(weights, weights_of(model)) == [] else []
    return wrong


def made(kind: str, form: str, root: Path) -> tuple[Any, Any]:
    model = forms.make_model(form, torch.float32)
    plain = MAKES["adamw"](model)
    if kind == "plain":
        return model, plain
    group = dist.group.WORLD
    return model, optstream.offload(plain, root, model=model, window="64KiB", process_group=group)


@pytest.mark.parametrize(("form", "flat"), [("fsdp", False), ("hsdp", True)])
def test_torchs_own_checkpoints_are_those_of_the_plain_optimizer(
    ranks: Ranks, tmp_path: Path, form: str, flat: bool
) -> None:
    for wrong in ranks(4, through_dcp, tmp_path, form, flat):
        assert wrong == []
