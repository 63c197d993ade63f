"""GradScaler with rules that divide by the scale in their kernel: the bits of the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream
from optstream.store.direct import Direct
from parity.cases import MasterLoop, assert_same_bits, make_params, set_grads

SHAPES = ((90, 130), (7,), (2, 4099), (50, 1000))
FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}


class Scaled:
    """Steps with gradients times a scale that is no power of two; some steps overflow."""

    def __init__(self, params: Sequence[nn.Parameter], optimizer: Any) -> None:
        self.params, self.optimizer = params, optimizer
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2
        )
        self.scaler.scale(torch.zeros(()))  # makes its tensors

    def step(self, number: int, *, unscale: bool = False, overflow: bool = False) -> None:
        set_grads(self.params, number)
        for param in self.params:
            assert param.grad is not None
            param.grad *= self.scaler.get_scale()
        if overflow:
            self.params[0].grad[0, 0] = float("inf")  # type: ignore[index]
        if unscale:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, *, unscale: bool = False) -> list[Tensor]:
        for number in range(8):
            self.step(number, unscale=unscale, overflow=number in (2, 5))
        return [param.detach() for param in self.params]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fused_rules_divide_by_the_scale_themselves(
    name: str, unscale: bool, tmp_path: Path
) -> None:
    plain, streamed = make_params(SHAPES), make_params(SHAPES)
    expected = Scaled(plain, FUSED[name](plain)).train(unscale=unscale)
    with optstream.offload(FUSED[name](streamed), tmp_path, window="64KiB") as optimizer:
        found = Scaled(streamed, optimizer).train(unscale=unscale)
        assert optimizer.report is not None
        assert optimizer.report.step == 6
        assert (
            not {"grad_scale", "found_inf"} & (vars(optimizer) | vars(optimizer._optimizer)).keys()
        )
    assert_same_bits(found, expected)
    for left, right in zip(streamed, plain, strict=True):
        assert_same_bits([left.grad], [right.grad])  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_get_what_the_textbook_loop_gives_them(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, streamed = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    loop = MasterLoop(FUSED["AdamW"], plain)
    scale = torch.tensor(1000.0)
    loop.optimizer.grad_scale, loop.optimizer.found_inf = scale, torch.tensor(0.0)  # type: ignore[attr-defined]
    with optstream.offload(FUSED["AdamW"](streamed), tmp_path, window="64KiB") as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        scaler.scale(torch.zeros(()))
        for number in range(4):
            set_grads(plain, number)
            set_grads(streamed, number)
            loop.step()
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(streamed, plain)


def test_an_overflow_in_the_first_step_makes_no_state(tmp_path: Path) -> None:
    """torch's own fused SGD goes on with momentum that it never wrote."""
    params, alone = make_params(SHAPES), make_params(SHAPES)
    with optstream.offload(FUSED["SGD"](params), tmp_path, window="64KiB") as optimizer:
        scaled = Scaled(params, optimizer)
        scaled.step(0, overflow=True)
        assert optimizer.report is None
        for number in range(1, 4):
            scaled.step(number)
    reference = Scaled(alone, FUSED["SGD"](alone))
    reference.scaler.update(300.0)
    for number in range(1, 4):
        reference.step(number)
    assert_same_bits(params, alone)


@pytest.mark.parametrize("again", ["scaler", "optimizer"])
def test_a_failed_step_goes_on_with_its_scale(
    again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, streamed = make_params(SHAPES), make_params(SHAPES)
    reference = Scaled(plain, FUSED["AdamW"](plain))
    with optstream.offload(FUSED["AdamW"](streamed), tmp_path, window="64KiB") as optimizer:
        scaled = Scaled(streamed, optimizer)
        for each in (reference, scaled):
            each.step(0)

        def fail(store: Direct, window: int, *rest: Any) -> None:
            if window == 8:
                raise optstream.OffloadError("as told")
            read(store, window, *rest)

        read = Direct.read
        monkeypatch.setattr(Direct, "read", fail)
        with pytest.raises(optstream.OffloadError, match="as told"):
            scaled.step(1)
        monkeypatch.undo()
        if again == "scaler":
            scaled.scaler.step(optimizer)
        else:
            optimizer.step()
        reference.step(1)
        assert_same_bits(streamed, plain)
        if again == "scaler":
            scaled.scaler.update()
            for each in (reference, scaled):
                each.step(2)
            assert_same_bits(streamed, plain)


def test_a_rule_that_takes_the_scaler_gets_unscaled_gradients(tmp_path: Path) -> None:
    class Older(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)
            self._step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            super().step()

    params = [nn.Parameter(torch.zeros(3))]
    with optstream.offload(Older(params), tmp_path) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(params[0], torch.full((3,), -0.5))
