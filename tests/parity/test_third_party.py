"""Optimizers from the package index and from users: torch's conventions, not torch's classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import Optimizer

import optstream
from parity.cases import (
    SHAPES,
    Case,
    MasterLoop,
    assert_same_bits,
    check_case,
    make_params,
    set_grads,
)

OURS = ((64, 96), (7,), (300, 80), (7,), (64, 96))


def packaged_cases() -> list[Case]:
    ours = pytorch_optimizer
    classes: list[tuple[type[Optimizer], dict[str, Any]]] = [
        (lion_pytorch.Lion, {"weight_decay": 0.1}),
        (ours.Lion, {"foreach": False}),
        (ours.Lion, {"foreach": True}),
        (ours.AdaBelief, {"rectify": True}),
        (ours.AdEMAMix, {}),
        (ours.ADOPT, {}),
        (ours.CAME, {}),
        (ours.Lamb, {}),
        (ours.LARS, {"momentum": 0.9}),
        (ours.Adan, {}),
        (ours.DiffGrad, {}),
        (ours.SM3, {}),
        (ours.NovoGrad, {}),
        (ours.QHAdam, {}),
    ]
    return [
        Case(
            "-".join([cls.__module__.split(".")[0], cls.__name__, *map(str, options.values())]),
            cls,
            options,
            OURS,
        )
        for cls, options in classes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", packaged_cases(), ids=str)
def test_ten_steps(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    check_case(case, dtype, tmp_path, window="64KiB")


@pytest.mark.parametrize("rate", [None, 0.0], ids=["", "warm-up from 0"])
@pytest.mark.parametrize(
    "cls",
    [
        pytorch_optimizer.Prodigy,
        pytorch_optimizer.DAdaptAdam,
        pytorch_optimizer.DAdaptLion,
        pytorch_optimizer.Ranger21,
    ],
)
def test_coupled_ones_are_refused(cls: type[Optimizer], rate: float | None, tmp_path: Path) -> None:
    more = {"num_iterations": 10} if cls is pytorch_optimizer.Ranger21 else {}
    inner = cls(make_params(OURS), **more)  # type: ignore[call-arg]
    if rate is not None:
        inner.param_groups[0]["lr"] = rate
    before = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    with pytest.raises(optstream.OffloadError, match=f"{cls.__name__} cannot be offloaded: "):
        optstream.offload(inner, tmp_path)
    assert not inner.state
    assert before == {k: v for k, v in inner.param_groups[0].items() if k != "params"}


def test_wrappers_of_optimizers_are_refused(tmp_path: Path) -> None:
    params = make_params(OURS)
    set_grads(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(
        optstream.OffloadError, match=r"Lookahead .* steps another optimizer, AdamW"
    ):
        optstream.offload(pytorch_optimizer.Lookahead(torch.optim.AdamW(params)), tmp_path)
    assert_same_bits(params, before)


def test_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(optstream.OffloadError, match="state 'k' belongs to no parameter"):
        optstream.offload(pytorch_optimizer.MADGRAD(make_params(OURS)), tmp_path)


# -- a user's own: what state and groups may look like


class Own(Optimizer):
    """Momentum, with whatever a test adds."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            self.before_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["moment"] = torch.zeros_like(param)
                    state["moment"].mul_(0.9).add_(param.grad)
                    param.sub_(state["moment"] * self.rate(group, state))
        return None

    def before_group(self, group: dict[str, Any]) -> None:
        return None

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"])


class CountsInGroup(Own):
    def before_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"] / group["step"])


class CountsInTensor(Own):
    """`+=` on a tensor changes it in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["step"] = torch.tensor(0.0)

    def before_group(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"] / group["step"])


class CountsInList(Own):
    def before_group(self, group: dict[str, Any]) -> None:
        group.setdefault("history", []).append(len(group.get("history", [])))

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"] / (1 + group["history"][-1]))


class CountsInAttribute(Own):
    num_steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.num_steps += 1
        return super().step()

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"] / self.num_steps)


class KeepsManyThings(Own):
    """State of any shape, dtype and Python type."""

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        moment = state["moment"]
        if "calls" not in state:
            state["rows"] = torch.zeros(moment.shape[:1], dtype=torch.float64)
            state["flags"] = torch.zeros(3, 5, dtype=torch.bool)
            state["count"] = torch.zeros(11, dtype=torch.int64)
            state["calls"], state["name"], state["parts"] = 0, "a", (1, [2.0])
        state["calls"] += 1
        state["parts"][1].append(float(state["calls"]))
        state["count"] += 1
        state["flags"][0, 0] = not state["flags"][0, 0]
        state["rows"] += moment.sum(list(range(1, moment.dim())) or 0, dtype=torch.float64)
        steps = int(state["count"][3]) + len(state["parts"][1]) + int(state["flags"][0, 0])
        # a value that is there in truth, not just a shape
        return 0.1 / (1 + steps + state["calls"]) if moment.device.type == "cpu" else 0.1


class RemovesState(Own):
    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] % 3 == 0:
            state["moment"].zero_()
        return 0.1


OWN = [
    CountsInGroup,
    CountsInTensor,
    CountsInList,
    CountsInAttribute,
    KeepsManyThings,
    RemovesState,
]


def grads_of_some_groups(params: Sequence[nn.Parameter], step: int) -> None:
    """In steps 1 and 4 the second group has none, in step 2 the first has none."""
    set_grads(params, step)
    for index, param in enumerate(params):
        second = index >= 3
        if (second and step in (1, 4)) or (not second and step == 2):
            param.grad = None


@pytest.mark.parametrize("frozen", [False, True], ids=["", "second group frozen at first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", OWN)
def test_own_state_and_counters(
    cls: type[Own], dtype: torch.dtype, frozen: bool, tmp_path: Path
) -> None:
    def make(params: Sequence[nn.Parameter]) -> Optimizer:
        return cls([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}])

    plain, streamed = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    for param in (*plain[3:], *streamed[3:]) if frozen else ():
        param.requires_grad_(False)
    loop = MasterLoop(make, plain)
    with optstream.offload(make(streamed), tmp_path, window="64KiB") as optimizer:
        for step in range(8):
            for params in (plain, streamed):
                grads_of_some_groups(params, step)
                for param in params[3:] if frozen else ():
                    param.requires_grad_(step >= 3)
                    if step < 3:
                        param.grad = None
            loop.step()
            optimizer.step()
            assert_same_bits(streamed, plain)
        for ours, theirs in zip(optimizer.param_groups, loop.param_groups, strict=True):
            for key in ours.keys() - {"params"}:
                assert ours[key] == theirs[key], key


def test_a_group_without_any_gradient_counts_the_step(tmp_path: Path) -> None:
    params = make_params(OURS)
    inner = pytorch_optimizer.Lion([{"params": params[:2]}, {"params": params[2:]}])
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        for step in range(3):
            set_grads(params[:2], step)
            optimizer.step()
        assert [group["step"] for group in optimizer.param_groups] == [3, 3]


class GlobalNorm(Own):
    def before_group(self, group: dict[str, Any]) -> None:
        grads = [param.grad for param in group["params"] if param.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else 1.0

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["lr"] / self.norm)


class SharedStepSize(Own):
    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        group["size"] = max(group.get("size", 0.0), float(state["moment"].abs().max()))
        return float(group["size"])


class Noisy(Own):
    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(torch.rand(()))


@pytest.mark.parametrize("cls", [GlobalNorm, SharedStepSize, Noisy])
def test_own_coupled_ones_are_refused(cls: type[Own], tmp_path: Path) -> None:
    inner = cls(make_params(OURS))
    with pytest.raises(
        optstream.OffloadError,
        match=r"cannot be offloaded: one parameter's update depends on other parameters",
    ):
        optstream.offload(inner, tmp_path)
    assert not list(tmp_path.iterdir())


def test_many_groups_are_not_taken_for_coupled(tmp_path: Path) -> None:
    params = make_params([(4, 4)] * 30)
    inner = lion_pytorch.Lion([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(params)])
    optstream.offload(inner, tmp_path).close()
    adan = pytorch_optimizer.Adan([{"params": [param]} for param in params])
    optstream.offload(adan, tmp_path).close()


class Tiled(Own):
    def is_elementwise(self, group: dict[str, Any]) -> bool:
        return True


def test_a_class_may_say_that_it_is_elementwise(tmp_path: Path) -> None:
    case = Case("Tiled", Tiled, {}, ((90, 400),))
    inner = case.make(make_params(case.shapes))
    with optstream.offload(inner, tmp_path / "plan", window="64KiB") as optimizer:
        assert all(window.state_bytes <= 65536 for window in optimizer.plan.windows)
    check_case(case, torch.float32, tmp_path, window="64KiB")


class LateState(Own):
    """Makes a tensor that the layout cannot foresee."""

    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] == 4:
            state["late"] = torch.ones(5)
        if "late" in state:
            state["late"] += 1
        return 0.1 / (1 + float(state["late"][0])) if "late" in state else 0.1


def test_state_that_comes_later_stays_in_memory_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case("LateState", LateState, {}, OURS)
    check_case(case, torch.float32, tmp_path, window="64KiB")
    assert "late" in caplog.text
    assert "was not foreseen" in caplog.text


class KeepsLists(Own):
    def rate(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state.setdefault("history", []).append(state["moment"].clone())
        return 0.1


def test_tensors_inside_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(optstream.OffloadError, match="'history' keeps tensors inside a list"):
        optstream.offload(KeepsLists(make_params(OURS)), tmp_path)
