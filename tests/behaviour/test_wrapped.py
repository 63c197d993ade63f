"""The wrapped optimizer itself, while its state is in files: no step of its own, no empty state."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import optstream
from parity.cases import SHAPES, assert_same_bits, make_params, set_grads, train


@pytest.mark.parametrize("name", ["step", "state_dict", "load_state_dict"])
def test_what_needs_the_state_is_refused(name: str, tmp_path: Path) -> None:
    params = make_params(SHAPES)
    plain = torch.optim.AdamW(params)
    train(params, plain, range(2))
    saved = plain.state_dict()
    with optstream.offload(plain, tmp_path) as streamed:
        set_grads(params, 2)
        before = [param.detach().clone() for param in params]
        arguments = (saved,) if name == "load_state_dict" else ()
        with pytest.raises(optstream.OffloadError, match=rf"call {name}\(\) of the optimizer that"):
            getattr(plain, name)(*arguments)
        assert_same_bits(params, before)
        assert not plain.state
        streamed.step()
        assert streamed.state_dict()["state"][0]["step"] == 3


def test_a_scaler_that_got_the_wrapped_one(tmp_path: Path) -> None:
    params = make_params(SHAPES)
    plain = torch.optim.AdamW(params, fused=True)
    with optstream.offload(plain, tmp_path):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(sum(param.sum() for param in params)).backward()  # type: ignore[union-attr]
        with pytest.raises(optstream.OffloadError, match=r"call step\(\)"):
            scaler.step(plain)


def test_gradients_and_groups_of_the_wrapped_one_are_those_of_the_streamed_one(
    tmp_path: Path,
) -> None:
    """`zero_grad()` and `add_param_group()` do the same on both."""
    alone, params, late = make_params(SHAPES), make_params(SHAPES), make_params(((9, 9),))
    plain = torch.optim.AdamW([(f"early{i}", param) for i, param in enumerate(params)])
    reference = torch.optim.AdamW(alone)
    late_alone = make_params(((9, 9),))
    with optstream.offload(plain, tmp_path, window="64KiB") as streamed:
        train(params, streamed, range(2))
        plain.zero_grad()
        assert all(param.grad is None for param in params)
        plain.add_param_group({"params": [("late", late[0])], "lr": 0.1})
        train([*params, *late], streamed, range(2, 4))
        assert [spec.name for spec in streamed._state.plan.params][-1] == "late"
    train(alone, reference, range(2))
    reference.add_param_group({"params": late_alone, "lr": 0.1})
    train([*alone, *late_alone], reference, range(2, 4))
    assert_same_bits([*params, *late], [*alone, *late_alone])


@pytest.mark.parametrize("made", ["before wrapping", "after"])
def test_schedulers_of_the_wrapped_one(made: str, tmp_path: Path) -> None:
    """They set the rate of the streamed one, and do not warn of a step that was replaced."""
    params = make_params(SHAPES)
    plain = torch.optim.AdamW(params, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if made == "before wrapping":
            scheduler = lr_scheduler.ExponentialLR(plain, 0.5)
        with optstream.offload(plain, tmp_path) as streamed:
            if made == "after":
                scheduler = lr_scheduler.ExponentialLR(plain, 0.5)
            train(params, streamed, range(1))
            scheduler.step()
            assert streamed.param_groups[0]["lr"] == 0.05
            with pytest.raises(optstream.OffloadError):
                plain.step()


def test_after_close_it_is_a_plain_optimizer_without_state(tmp_path: Path) -> None:
    alone, params = make_params(SHAPES), make_params(SHAPES)
    plain = torch.optim.AdamW(params)
    for _ in range(2):  # each wrap begins anew
        streamed = optstream.offload(plain, tmp_path)
        train(params, streamed, range(3))
        kept = streamed.state_dict()
        streamed.close()
        with pytest.raises(optstream.OffloadError, match="closed"):
            streamed.step()
    assert not plain.state
    plain.load_state_dict(kept)
    train(params, plain, range(3, 5))
    reference = torch.optim.AdamW(alone)
    train(alone, reference, range(3))
    reference.state.clear()
    train(alone, reference, range(5))
    assert_same_bits(params, alone)


def test_a_collected_one_no_longer_bars_it(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(3))]
    plain = torch.optim.SGD(params)
    optstream.offload(plain, tmp_path)
    train(params, plain, range(1))
