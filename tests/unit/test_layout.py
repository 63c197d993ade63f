"""What an optimizer keeps for a parameter, found without making it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import optstream
from optstream.layout import find_layout
from optstream.memory import read_memory
from optstream.plan import MASTER, ParamSpec, Plan, Temporaries
from optstream.streamed.params import Describer
from parity.cases import Case, make_params, set_grads, torch_cases

HUGE = (100_000, 50_000)


def describe(optimizer: Optimizer, *, master_weights: bool = True) -> ParamSpec:
    return Describer(optimizer, master_weights).describe("weight", 0, 0)


def no_values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", torch_cases(), ids=str)
def test_the_layout_is_what_a_step_makes(case: Case, dtype: torch.dtype) -> None:
    shape = case.shapes[0]
    found = describe(case.make(make_params([shape], dtype)))
    params = make_params([shape], dtype)
    real = case.make(params)
    set_grads(params, 0)
    real.step()
    kept = {
        key: (value.shape, value.stride(), value.dtype)
        for key, value in real.state[params[0]].items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    assert {s.key: (s.shape, s.stride, s.dtype) for s in found.states} == kept


@pytest.mark.parametrize(
    "cls",
    [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.ASGD, torch.optim.Muon],
)
def test_five_billion_elements_are_planned_without_memory(cls: type[Optimizer]) -> None:
    optimizer = cls(no_values(HUGE))  # type: ignore[call-arg]
    describe(optimizer)  # imports what it needs once
    before = read_memory().anon_bytes
    found = describe(optimizer)
    plan = Plan(256 * 2**20).extended([found])
    assert read_memory().anon_bytes - before < 16 * 2**20
    assert found.numel == 5_000_000_000
    assert plan.state_bytes == found.state_bytes
    if cls is torch.optim.AdamW:
        assert plan.state_bytes == 8 * math.prod(HUGE)
        assert all(window.data_bytes <= 256 * 2**20 for window in plan.windows)


def test_masters_come_first_and_states_are_theirs() -> None:
    found = describe(torch.optim.AdamW(no_values((8, 8), torch.bfloat16)))
    assert [state.key for state in found.states] == [MASTER, "exp_avg", "exp_avg_sq"]
    assert {state.dtype for state in found.states} == {torch.float32}
    assert found.state_bytes == 12 * 64
    found = describe(torch.optim.AdamW(no_values((8, 8), torch.bfloat16)), master_weights=False)
    assert {state.dtype for state in found.states} == {torch.bfloat16}
    assert not found.has_master


@pytest.mark.parametrize(
    ("options", "temporaries"),
    [
        ({"foreach": False}, Temporaries.ONE),
        ({"foreach": True}, Temporaries.BATCHED),
        ({"fused": True}, Temporaries.NONE),
    ],
)
def test_temporaries(options: dict[str, Any], temporaries: Temporaries) -> None:
    found = describe(torch.optim.AdamW(make_params([(64, 64)]), **options))
    assert found.temporaries is temporaries
    num_bytes = 4 * 64 * 64
    assert found.first_bytes >= 2 * num_bytes
    if temporaries is Temporaries.NONE:
        assert found.temporary_bytes == 0
    else:
        assert num_bytes <= found.temporary_bytes <= 4 * num_bytes


def test_looking_changes_nothing() -> None:
    params = make_params([(8, 8)])
    set_grads(params, 0)
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False)
    before = params[0].detach().clone()
    groups = [dict(group) for group in optimizer.param_groups]
    describe(optimizer)
    assert torch.equal(params[0], before)
    assert not optimizer.state
    assert [dict(group) for group in optimizer.param_groups] == groups


def test_a_counter_that_is_there_is_used_and_kept() -> None:
    """A rule may begin to keep something after some steps."""

    class Late(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                if state["step"] > 1000:
                    state["late"] = torch.zeros_like(param)

    params = make_params([(4, 4)])
    optimizer = Late(params)
    assert describe(optimizer).states == ()
    optimizer.state[params[0]]["step"] = torch.tensor(1000.0)
    assert [state.key for state in describe(optimizer).states] == ["late"]
    assert optimizer.state[params[0]]["step"] == 1000


def test_a_rule_that_needs_values_is_refused() -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                param.grad.numpy()
            return super().step(closure)

    optimizer = Reads(make_params([(4, 4)]))
    with pytest.raises(optstream.OffloadError, match="cannot be found without running it"):
        find_layout(
            optimizer, optimizer.param_groups[0], (4, 4), (4, 1), torch.float32, {}, torch.float32
        )
