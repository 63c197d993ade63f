"""state_dict and load_state_dict as torch has them, and what snapshots promise beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
from optstream import OffloadError
from parity.cases import make_params

ON_DRIVE = pytest.mark.parametrize("store", ["direct", "mapped"])


@ON_DRIVE
def test_tensors_keep_their_values_while_training_goes_on(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path, dtype=torch.bfloat16, store=store)
    with optimizer:
        taken, copies = [], []
        for step in range(3):
            go_on(params, optimizer, [step])
            taken.append(optimizer.state_dict())
            copies.append(copied(taken[-1]))
        go_on(params, optimizer, range(3, 6))
        for given, copy in zip(taken, copies, strict=True):
            assert_same_state(copied(given), copy)
    assert_same_bits(weights(params), after(6, torch.bfloat16))


@ON_DRIVE
def test_torch_save_and_load(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        kept = weights(params)
        for mmap in (True, False):
            go_on(params, optimizer, [7])
            set_weights(params, kept)
            optimizer.load_state_dict(
                state_dict=torch.load(tmp_path / "state.pt", mmap=mmap, weights_only=True)
            )
        go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3))


ON_DRIVE = pytest.mark.parametrize("store", ["direct", "mapped"])


def test_hooks_run_once_around_the_whole(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path)
    calls: list[str] = []

    def replaced(opt: Any, given: dict[str, Any]) -> dict[str, Any]:
        assert opt is optimizer
        calls.append("before load")
        given["param_groups"][0]["lr"] = 0.5
        return given

    def marked(opt: Any, given: dict[str, Any]) -> dict[str, Any]:
        calls.append("after dict")
        return {**given, "mine": 1}

    with optimizer:
        optimizer.register_state_dict_pre_hook(lambda opt: calls.append("before dict"))
        optimizer.register_state_dict_post_hook(marked)
        optimizer.register_load_state_dict_pre_hook(replaced)
        optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("after load"))
        go_on(params, optimizer, [0])
        given = optimizer.state_dict()
        assert given["mine"] == 1
        optimizer.load_state_dict(given)
        assert calls == ["before dict", "after dict", "before load", "after load"]
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_groups_keep_their_identity_and_take_the_values(tmp_path: Path) -> None:
    """Schedulers hold the group dictionaries; tensors among the values stay on their device."""
    params = make_params(SHAPES)
    inner = torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False, capturable=False)
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        go_on(params, optimizer, range(2))
        group = optimizer.param_groups[0]
        given = optimizer.state_dict()
        given["param_groups"][0] |= {
            "lr": torch.tensor(0.25),
            "initial_lr": 0.5,
            "betas": (0.5, 0.6),
        }
        optimizer.load_state_dict(given)
        assert optimizer.param_groups[0] is group
        assert optimizer.param_groups is inner.param_groups
        assert float(group["lr"]) == 0.25
        assert (group["initial_lr"], group["betas"]) == (0.5, (0.5, 0.6))
        assert all(a is b for a, b in zip(group["params"], params, strict=True))
        optimizer.save(tmp_path / "checkpoint")
        group["lr"] = torch.tensor(1.0)
        optimizer.load(tmp_path / "checkpoint")
        assert isinstance(group["lr"], torch.Tensor)
        assert (float(group["lr"]), group["betas"]) == (0.25, (0.5, 0.6))


def test_a_state_dict_of_an_older_torch(tmp_path: Path) -> None:
    """Steps were numbers, options of today were not there."""
    params, optimizer = streamed(tmp_path)
    plain_params = make_params(SHAPES)
    plain = adamw(plain_params)
    go_on(plain_params, plain, range(3))
    given = plain.state_dict()
    old: dict[str, Any] = {
        "state": {i: {**s, "step": int(s["step"])} for i, s in given["state"].items()},
        "param_groups": [
            {
                key: value
                for key, value in given["param_groups"][0].items()
                if key in ("lr", "betas", "eps", "weight_decay", "params")
            }
        ],
    }
    with optimizer:
        set_weights(params, weights(plain_params))
        optimizer.load_state_dict(old)
        optimizer.param_groups[0]["foreach"] = False
        go_on(params, optimizer, range(3, 5))
    go_on(plain_params, plain, range(3, 5))
    assert_same_bits(weights(params), weights(plain_params))


@ON_DRIVE
def test_the_view_shows_adopted_state(store: str, tmp_path: Path) -> None:
    """Small parts of what a checkpoint's files hold, whose digests are of whole pieces."""
    params, optimizer = streamed(
        tmp_path / "a", shapes=((1500, 2000), (7,)), window="64MiB", store=store
    )
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        expected = optimizer.state_dict()["state"]
        optimizer.load(tmp_path / "checkpoint")
        for index, param in enumerate(params):
            view = optimizer.state[param]
            assert list(view) == list(expected[index])
            for key, value in view.items():
                assert torch.equal(value, expected[index][key]), key


@pytest.mark.parametrize("how", ["save", "state_dict"])
def test_frozen_added_and_unfrozen_parameters(how: str, tmp_path: Path) -> None:
    """The plan grows between saves; what has no state yet has none after the load."""

    def build(directory: str) -> tuple[list[torch.nn.Parameter], Any]:
        params = make_params(SHAPES)
        params[1].requires_grad = False
        inner = adamw(params[:4])
        return params, optstream.offload(inner, tmp_path / directory, window="64KiB")

    def train(params: list[torch.nn.Parameter], optimizer: Any, number: int) -> None:
        for param in params:
            torch.manual_seed(number)
            param.grad = torch.randn_like(param) if param.requires_grad else None
        optimizer.step()

    def pass_on(source: Any, target: Any) -> None:
        if how == "save":
            source.save(tmp_path / "checkpoint")
            optstream.verify(tmp_path / "checkpoint")
            target.load(tmp_path / "checkpoint")
        else:
            target.load_state_dict(source.state_dict())

    params, optimizer = build("a")
    resumed, other = build("b")
    with optimizer, other:
        train(params[:4], optimizer, 0)
        pass_on(optimizer, other)
        for those, one in ((params, optimizer), (resumed, other)):
            one.add_param_group({"params": those[4:], "lr": 0.5})
            those[1].requires_grad = True
        pass_on(optimizer, other)
        train(params, optimizer, 1)
        pass_on(optimizer, other)
        set_weights(resumed, weights(params))
        train(params, optimizer, 2)
        train(resumed, other, 2)
        assert_same_state(copied(other.state_dict()), copied(optimizer.state_dict()))
    assert_same_bits(weights(resumed), weights(params))


@pytest.mark.parametrize("how", ["save", "state_dict"])
def test_state_of_parameters_that_are_frozen_now(how: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a")
    resumed = make_params(SHAPES, seed=1)
    resumed[0].requires_grad = resumed[3].requires_grad = False
    other = optstream.offload(adamw(resumed), tmp_path / "b", window="64KiB")
    with optimizer, other:
        go_on(params, optimizer, range(2))
        if how == "save":
            optimizer.save(tmp_path / "checkpoint")
            other.load(tmp_path / "checkpoint")
        else:
            other.load_state_dict(optimizer.state_dict())
        assert_same_state(copied(other.state_dict()), copied(optimizer.state_dict()))
        set_weights(resumed, weights(params))
        for param in resumed:
            param.requires_grad = True
        go_on(resumed, other, [2])
    assert_same_bits(weights(resumed), after(3))


@ON_DRIVE
def test_parameters_without_a_gradient_so_far(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", store=store)
    resumed, other = streamed(tmp_path / "b", window="16MiB", store=store)
    with optimizer, other:
        for param in params[:3]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        for load in (
            lambda: other.load_state_dict(optimizer.state_dict()),
            lambda: (optimizer.save(tmp_path / "c"), other.load(tmp_path / "c")),
        ):
            load()
            assert set(map(id, other.state)) == {id(param) for param in resumed[:3]}
        set_weights(resumed, weights(params))
        go_on(params, optimizer, [1])
        go_on(resumed, other, [1])
        assert optimizer.state[params[5]]["step"] == 1
    assert_same_bits(weights(resumed), weights(params))


class Grown(torch.optim.Optimizer):
    """Adds a state that nobody foresaw when `more` is switched on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "more": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                if group["more"]:
                    state["late"] = state.get("late", torch.zeros_like(param)) + 1
                param.sub_(state["sum"] + state.get("late", 0), alpha=0.01)


def test_state_that_was_not_foreseen_is_saved_too(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", kind=Grown)
    resumed, other = streamed(tmp_path / "b", kind=Grown)
    with optimizer, other:
        go_on(params, optimizer, [0])
        optimizer.param_groups[0]["more"] = True
        go_on(params, optimizer, [1])
        optimizer.save(tmp_path / "checkpoint")
        assert torch.equal(optimizer.state_dict()["state"][0]["late"], torch.ones(90, 130))
        with pytest.raises(OffloadError, match=r"has 'group0.param0'/late"):
            other.load(tmp_path / "checkpoint")
        optimizer.load(tmp_path / "checkpoint", strict=False)
        set_weights(resumed, weights(params))
        go_on(params, optimizer, [2])
        assert torch.equal(optimizer.state_dict()["state"][0]["late"], torch.full((90, 130), 2.0))
