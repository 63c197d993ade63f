"""State and hyperparameters of another optimizer or model: taken where whole, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optstream
from checkpoint.runs import (
    adamw,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from optstream import OffloadError
from optstream.layout import hyperparameters
from optstream.optimizer import StreamedOptimizer
from parity.cases import make_params

MATRICES = ((90, 130), (64, 32))
Kind = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def muon(**options: Any) -> Kind:
    return lambda params: optstream.Muon(params, **options)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.03, foreach=False), muon(use_muon=False)),
        (lambda p: torch.optim.Muon(p, lr=0.03, momentum=0.8, ns_steps=2), muon()),
    ],
)
def test_a_state_dict_of_torchs_class_in_our_muon(kind: Kind, own: Kind, tmp_path: Path) -> None:
    params = make_params(MATRICES, torch.float32)
    plain = kind(params)
    go_on(params, plain, range(2))
    twin_params = make_params(MATRICES, torch.float32)
    twin = own(twin_params)
    set_weights(twin_params, weights(params))
    twin.load_state_dict(plain.state_dict())
    own_params, optimizer = streamed(tmp_path, shapes=MATRICES, kind=own)
    with optimizer:
        set_weights(own_params, weights(params))
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.03
        go_on(own_params, optimizer, [2])
    go_on(twin_params, twin, [2])
    assert_same_bits(weights(own_params), weights(twin_params))


def test_hyperparameters_that_the_optimizer_refuses_change_nothing(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path, shapes=MATRICES, kind=muon(use_muon=False))
    with optimizer:
        go_on(params, optimizer, range(2))
        before = copied(optimizer.state_dict())
        groups = [dict(group) for group in optimizer.param_groups]
        given = optimizer.state_dict()
        given["param_groups"][0]["amsgrad"] = True
        with pytest.raises(OffloadError, match="amsgrad=True is not allowed"):
            optimizer.load_state_dict(given)
        assert_same_state(copied(optimizer.state_dict()), before)
        assert groups == optimizer.param_groups
        go_on(params, optimizer, [2])


@pytest.mark.parametrize(
    ("kind", "own", "whole"),
    [
        (torch.optim.AdamW, torch.optim.NAdam, False),
        (torch.optim.AdamW, torch.optim.SGD, False),
        (torch.optim.RMSprop, torch.optim.Adagrad, False),
        (torch.optim.AdamW, torch.optim.Adamax, False),
        (torch.optim.NAdam, torch.optim.AdamW, True),
        (torch.optim.AdamW, torch.optim.RAdam, True),
    ],
)
def test_another_class_where_not_strict(
    kind: Any, own: Any, whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """State that is whole is taken; a parameter with a part of it starts anew."""
    params, optimizer = streamed(
        tmp_path / "a", shapes=MATRICES, kind=lambda p: kind(p, lr=0.002, foreach=False)
    )
    options = {"momentum": 0.9} if own is torch.optim.SGD else {}
    own_params, other = streamed(
        tmp_path / "b", shapes=MATRICES, kind=lambda p: own(p, lr=0.1, foreach=False, **options)
    )
    with optimizer, other:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        keys = hyperparameters(other.param_groups[0]).keys()
        other.load(tmp_path / "checkpoint", strict=False)
        assert keys <= hyperparameters(other.param_groups[0]).keys()
        assert other.param_groups[0]["lr"] == 0.002
        assert (own_params[0] in other.state) == whole
        assert ("starts anew" in caplog.text) != whole
        go_on(own_params, other, [2])
        if own is not torch.optim.SGD:
            assert other.state[own_params[0]]["step"] == (3 if whole else 1)
        other.save(tmp_path / "after")


def test_strict_false_takes_what_fits_and_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        go_on(params, optimizer, range(2))
        given = optimizer.state_dict()
        given["state"].pop(1)
        given["state"][0]["more"] = torch.zeros(3)
        given["state"][2]["exp_avg"] = torch.zeros(7)
        own_params, other = streamed(tmp_path / "other")
        with other:
            other.load_state_dict(given, strict=False)
            assert "has 'group0.param0'/more" in caplog.text
            assert "starts anew of group0.param1, group0.param2" in caplog.text
            go_on(own_params, other, [2])
            steps = [other.state[param]["step"] for param in own_params[:3]]
            assert steps == [3, 1, 1]


class Layers(nn.Module):
    def __init__(self, **widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, width in widths.items():
            setattr(self, name, nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).sum() for layer in self.children()), torch.zeros(()))


def offloaded(directory: Path, model: nn.Module, *, named: bool = True) -> StreamedOptimizer:
    optimizer = adamw(list(model.parameters()))
    return optstream.offload(optimizer, directory, model=model if named else None)


def step(model: nn.Module, optimizer: StreamedOptimizer) -> None:
    model(torch.ones(3, 8)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("widths", "fresh"),
    [({"a": 4, "b": 5}, {"b"}), ({"a": 4, "b": 6, "c": 3}, {"c"}), ({"b": 6}, set())],
)
def test_another_model_where_not_strict(
    widths: dict[str, int], fresh: set[str], tmp_path: Path
) -> None:
    """Another width, one layer more, one less."""
    saved = Layers(a=4, b=6)
    model = Layers(**widths)
    with offloaded(tmp_path / "a", saved) as optimizer, offloaded(tmp_path / "b", model) as other:
        step(saved, optimizer)
        optimizer.save(tmp_path / "checkpoint")
        with pytest.raises(OffloadError):
            other.load(tmp_path / "checkpoint")
        other.load(tmp_path / "checkpoint", strict=False)
        step(model, other)
        for name, layer in model.named_children():
            assert other.state[layer.weight]["step"] == (1 if name in fresh else 2), name


def test_parameters_without_names_are_never_guessed(tmp_path: Path) -> None:
    saved, model = Layers(a=4, b=6), Layers(a=4)
    with (
        offloaded(tmp_path / "a", saved, named=False) as optimizer,
        offloaded(tmp_path / "b", model, named=False) as other,
    ):
        optimizer.save(tmp_path / "checkpoint")
        with pytest.raises(OffloadError, match="wrapped without model"):
            other.load(tmp_path / "checkpoint", strict=False)


def named(directory: Path, model: nn.Module) -> StreamedOptimizer:
    return optstream.offload(torch.optim.AdamW(list(model.named_parameters())), directory)


def test_other_names_in_a_state_dict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, model = Layers(a=8, b=8), Layers(y=8, x=8)
    with named(tmp_path / "a", saved) as optimizer, named(tmp_path / "b", model) as other:
        step(saved, optimizer)
        given = optimizer.state_dict()
        with pytest.raises(OffloadError, match=r"has 'a.weight' where this optimizer has 'y.weig"):
            other.load_state_dict(given)
        assert len(other.state) == 0
        other.load_state_dict(given, strict=False)
        assert "matched by position" in caplog.text
        assert other.state[model.y.weight]["step"] == 1


def test_a_wrappers_prefix_is_no_other_name(tmp_path: Path) -> None:
    saved = Layers(a=8)
    with named(tmp_path / "a", saved) as optimizer:
        step(saved, optimizer)
        with named(tmp_path / "b", nn.ModuleDict({"module": Layers(a=8)})) as other:
            other.load_state_dict(optimizer.state_dict())
