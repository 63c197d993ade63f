"""The result of `offload` is a real torch.optim.Optimizer: what works with a plain one works."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

import optstream
from parity.cases import MasterLoop, assert_same_bits, bits

Schedule = Callable[[Optimizer], lr_scheduler.LRScheduler]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7)).to(dtype)


def backward(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 40, generator=generator).to(dtype)
    loss = model(inputs).float().square().mean()
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both(
    run: Callable[[Callable[[Optimizer], Optimizer]], Any], directory: Path
) -> tuple[Any, Any]:
    """Run once with the plain optimizer and once with `offload` around it."""
    return run(lambda optimizer: optimizer), run(
        lambda optimizer: optstream.offload(optimizer, directory, window="64KiB")
    )


# -- learning rate schedulers

SCHEDULES: dict[str, tuple[Callable[[nn.Module], Optimizer], Schedule]] = {
    "LambdaLR": (adamw, lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "warm-up from 0": (adamw, lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 10)),
    "OneCycleLR, betas": (adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12)),
    "OneCycleLR, momentum": (sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12)),
    "SequentialLR": (
        sgd,
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.7)],
            milestones=[3],
        ),
    ),
    "CosineAnnealingLR": (sgd, lambda o: lr_scheduler.CosineAnnealingLR(o, 8)),
}


@pytest.mark.parametrize("made", ["on the wrapper", "before wrapping"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name: str, made: str, tmp_path: Path) -> None:
    make, schedule = SCHEDULES[name]

    def run(wrap: Callable[[Optimizer], Optimizer]) -> tuple[list[Tensor], list[float]]:
        model = make_model()
        optimizer = make(model)
        if made == "before wrapping":
            scheduler = schedule(optimizer)
            optimizer = wrap(optimizer)
        else:
            optimizer = wrap(optimizer)
            scheduler = schedule(optimizer)
        rates = []
        for step in range(10):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            scheduler.step()
            rates += scheduler.get_last_lr()
        return values(model), rates

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        warnings.filterwarnings("ignore", "The epoch parameter")
        plain, streamed = both(run, tmp_path)
    assert streamed[1] == plain[1]
    assert_same_bits(streamed[0], plain[0])


def test_reduce_on_plateau(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> tuple[list[Tensor], list[float]]:
        model = make_model()
        optimizer = wrap(adamw(model))
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
        rates = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = backward(model, 0)
            optimizer.step()
            scheduler.step(loss)
            rates.append(optimizer.param_groups[0]["lr"])
        return values(model), rates

    plain, streamed = both(run, tmp_path)
    assert len(set(streamed[1])) > 1
    assert streamed[1] == plain[1]
    assert_same_bits(streamed[0], plain[0])


def test_hyperparameters_are_read_at_every_step(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(adamw(model))
        for step in range(6):
            backward(model, step)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            optimizer.param_groups[0]["betas"] = (0.5 + 0.05 * step, 0.9)
            optimizer.param_groups[0]["maximize"] = step == 3
            optimizer.step()
        return values(model)

    assert_same_bits(*both(run, tmp_path))


# -- gradients


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm(foreach: bool, tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(adamw(model))
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
            optimizer.step()
        return values(model)

    assert_same_bits(*both(run, tmp_path))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_grad_scaler_skips_steps_with_inf(unscale: bool, fused: bool, tmp_path: Path) -> None:
    def run(
        wrap: Callable[[Optimizer], Optimizer],
    ) -> tuple[list[Tensor], list[float], list[bool]]:
        model = make_model()
        optimizer = wrap(adamw(model, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales, moved = [], []
        for step in range(8):
            before = values(model)
            optimizer.zero_grad()
            inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs).square().mean()).backward()
            if step in (0, 3):
                next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(before[0], values(model)[0]))
        return values(model), scales, moved

    plain, streamed = both(run, tmp_path)
    assert streamed[1] == plain[1]
    assert streamed[1][0] == 128.0
    assert max(streamed[1]) > 256.0
    assert streamed[2] == [False, True, True, False, True, True, True, True]
    assert_same_bits(streamed[0], plain[0])


def test_a_skipped_step_moves_no_bytes_and_no_counter(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(adamw(model), tmp_path) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 40)).sum()).backward()
            if step == 1:
                next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.report is not None
        assert optimizer.report.step == 1


def test_fp16_parameters_are_refused_by_the_scaler_as_with_plain_ones(tmp_path: Path) -> None:
    model = make_model(torch.float16)
    with optstream.offload(adamw(model), tmp_path) as optimizer:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 40, dtype=torch.float16)).sum()).backward()
        with pytest.raises(ValueError, match="FP16"):
            scaler.step(optimizer)


def test_zero_grad(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(adamw(model), tmp_path) as optimizer:
        backward(model, 0)
        optimizer.zero_grad(set_to_none=False)
        assert all(not param.grad.any() for param in model.parameters())  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=True)
        assert all(param.grad is None for param in model.parameters())


def test_closure(tmp_path: Path) -> None:
    calls = []

    def run(wrap: Callable[[Optimizer], Optimizer]) -> tuple[list[Tensor], list[float]]:
        model = make_model()
        optimizer = wrap(sgd(model))
        losses = []
        for step in range(4):

            def closure(step: int = step) -> float:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                return float(backward(model, step))

            with torch.no_grad() if step == 2 else nullcontext():
                losses.append(optimizer.step(closure))
        return values(model), losses

    plain, streamed = both(run, tmp_path)
    assert calls == [True] * 8
    assert streamed[1] == plain[1]
    assert_same_bits(streamed[0], plain[0])


# -- groups and names


def test_add_param_group(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(torch.optim.AdamW(model[0].parameters(), lr=0.01))
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [model[2].weight], "lr": 0.1})
                optimizer.add_param_group({"params": [model[2].bias], "amsgrad": True})
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        return values(model)

    assert_same_bits(*both(run, tmp_path))


def test_add_param_group_reserves_space(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(adamw(model[0]), tmp_path) as optimizer:
        before = optimizer.plan.state_bytes
        optimizer.add_param_group({"params": model[2].parameters()})
        added = 2 * 4 * sum(param.numel() for param in model[2].parameters())
        assert optimizer.plan.state_bytes == before + added
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group({"params": model[2].parameters()})
        assert len(optimizer.param_groups) == 2


def plan_names(optimizer: optstream.StreamedOptimizer) -> list[str]:
    return [spec.name for spec in optimizer.plan.params]


def test_named_parameters(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(torch.optim.AdamW(model.named_parameters(), lr=0.01))
        if isinstance(optimizer, optstream.StreamedOptimizer):
            assert plan_names(optimizer) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        for step in range(3):
            backward(model, step)
            optimizer.step()
        assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
        return values(model)

    assert_same_bits(*both(run, tmp_path))


def test_names_come_from_the_model(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(adamw(model), tmp_path / "named", model=model) as optimizer:
        assert plan_names(optimizer) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with optstream.offload(adamw(model), tmp_path / "plain") as optimizer:
        assert plan_names(optimizer)[2] == "group0.param2"


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([first, second])
    inner.param_groups[0]["param_names"] = ["weight", "weight"]
    with pytest.raises(optstream.OffloadError, match="named 'weight'"):
        optstream.offload(inner, tmp_path)


def test_attributes_of_an_optimizer(tmp_path: Path) -> None:
    model = make_model()
    inner = adamw(model)
    with optstream.offload(inner, tmp_path) as optimizer:
        assert isinstance(optimizer, Optimizer)
        assert optimizer.defaults == inner.defaults
        assert optimizer.param_groups is inner.param_groups
        assert "lr: 0.01" in repr(optimizer)
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)


# -- hooks


def test_hooks_fire_once_a_step(tmp_path: Path) -> None:
    model = make_model()
    fired: list[str] = []

    def note(text: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: fired.append(f"{text} {type(optimizer).__name__}")

    inner = adamw(model)
    inner.register_step_pre_hook(note("inner pre"))
    inner.register_step_post_hook(note("inner post"))
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        assert optimizer.plan.num_windows > 1
        optimizer.register_step_pre_hook(note("own pre"))
        removed = optimizer.register_step_post_hook(note("own post"))
        everywhere = [
            torch_optimizer.register_optimizer_step_pre_hook(note("all pre")),
            torch_optimizer.register_optimizer_step_post_hook(note("all post")),
        ]
        try:
            for step in range(2):
                backward(model, step)
                optimizer.step()
                removed.remove()
        finally:
            for hook in everywhere:
                hook.remove()
    first = ["all pre", "inner pre", "own pre", "inner post", "own post", "all post"]
    expected = [*first, *(text for text in first if text != "own post")]
    assert fired == [f"{text} StreamedOptimizer" for text in expected]


class CountsSteps(torch.optim.AdamW):
    """A subclass that calls its base, whose step runs hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_of_a_subclass_do_not_fire_for_windows(tmp_path: Path) -> None:
    model = make_model()
    adamw(model)  # torch gives AdamW.step its hooks when the first one is made
    fired = []
    inner = CountsSteps(model.parameters())
    inner.register_step_post_hook(lambda *_: fired.append("post"))
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        assert optimizer.plan.num_windows > 1
        backward(model, 0)
        optimizer.step()
    assert fired == ["post"]


# -- what the model does to its parameters


@pytest.fixture
def bf16(tmp_path: Path) -> Iterator[tuple[nn.Sequential, optstream.StreamedOptimizer]]:
    model = make_model(torch.bfloat16)
    with optstream.offload(adamw(model), tmp_path, window="64KiB", model=model) as optimizer:
        yield model, optimizer


def test_a_swapped_parameter_is_followed(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            if step == 2:
                model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
                optimizer.param_groups[0]["params"][0] = model[0].weight
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        return values(model)

    assert_same_bits(*both(run, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda param: torch.zeros(3, 3),
        lambda param: param.detach().double(),
        lambda param: param.detach().bfloat16(),
    ],
    ids=["shape", "float64", "bfloat16"],
)
def test_another_shape_or_dtype_is_an_error_before_anything_changes(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = make_model()
    with optstream.offload(adamw(model), tmp_path, model=model) as optimizer:
        backward(model, 0)
        optimizer.step()
        swapped = nn.Parameter(change(model[2].weight))
        swapped.grad = torch.ones_like(swapped)
        optimizer.param_groups[0]["params"][2] = swapped
        before, report = values(model), optimizer.report
        with pytest.raises(optstream.OffloadError, match=r"2\.weight is now .* its state"):
            optimizer.step()
        assert_same_bits(values(model), before)
        assert optimizer.report is report


def test_a_model_that_was_cast_after_wrapping_is_an_error(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(adamw(model), tmp_path, model=model) as optimizer:
        model.to(torch.bfloat16)
        backward(model, 0)
        before = values(model)
        with pytest.raises(optstream.OffloadError, match=r"0\.weight is now .*bfloat16"):
            optimizer.step()
        assert_same_bits(values(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_data_of_a_parameter_is_followed(dtype: torch.dtype, tmp_path: Path) -> None:
    def change(model: nn.Sequential, step: int) -> None:
        if step == 2:
            weight = model[0].weight
            weight.data = torch.full_like(weight, 0.25)

    model, plain = make_model(dtype), make_model(dtype)
    loop = MasterLoop(lambda params: torch.optim.AdamW(params, lr=0.01), list(plain.parameters()))
    with optstream.offload(adamw(model), tmp_path, window="64KiB") as optimizer:
        for step in range(4):
            for each in (model, plain):
                each.zero_grad()
                change(each, step)
                backward(each, step)
            if step == 2 and dtype == torch.bfloat16:
                loop.masters[0].data.fill_(0.25)
            loop.step()
            optimizer.step()
    assert_same_bits(values(model), values(plain))


def test_new_data_in_another_order_is_an_error(tmp_path: Path) -> None:
    """A slice of such a parameter would be a copy, and the update would be lost."""
    model = make_model()
    with optstream.offload(adamw(model), tmp_path, model=model) as optimizer:
        backward(model, 0)
        optimizer.step()
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        before = values(model)
        with pytest.raises(optstream.OffloadError, match=r"0\.weight .*contiguous"):
            optimizer.step()
        assert_same_bits(values(model), before)


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data.copy_", "numpy"])
def test_masters_follow_weights_from_outside(
    how: str, bf16: tuple[nn.Sequential, optstream.StreamedOptimizer]
) -> None:
    model, optimizer = bf16
    plain = make_model(torch.bfloat16)
    loop = MasterLoop(lambda params: torch.optim.AdamW(params, lr=0.01), list(plain.parameters()))
    loaded = {key: value * 0.5 + 1 for key, value in plain.state_dict().items()}
    for step in range(5):
        for each in (model, plain):
            each.zero_grad()
            backward(each, step)
        if step == 3:
            write(model, loaded, how)
            plain.load_state_dict(loaded)
            for master, param in zip(loop.masters, loop.params, strict=True):
                master.data.copy_(param)
        loop.step()
        optimizer.step()
    assert_same_bits(values(model), values(plain))


def write(model: nn.Module, loaded: dict[str, Tensor], how: str) -> None:
    if how == "load_state_dict":
        model.load_state_dict(loaded)
        return
    for name, param in model.named_parameters():
        if how == "copy_":
            with torch.no_grad():
                param.copy_(loaded[name])
        elif how == "data.copy_":
            param.data.copy_(loaded[name])
        else:
            param.detach().view(torch.int16).numpy()[:] = loaded[name].view(torch.int16).numpy()


def test_weights_swapped_out_and_back_lose_no_master_bits(
    bf16: tuple[nn.Sequential, optstream.StreamedOptimizer],
) -> None:
    """As an exponential moving average does for an evaluation."""
    model, optimizer = bf16
    plain = make_model(torch.bfloat16)
    loop = MasterLoop(lambda params: torch.optim.AdamW(params, lr=0.01), list(plain.parameters()))
    for step in range(6):
        for each in (model, plain):
            each.zero_grad()
            backward(each, step)
        loop.step()
        optimizer.step()
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({key: value * 0 for key, value in kept.items()})
        model.load_state_dict(kept)
    assert_same_bits(values(model), values(plain))


# -- wrapping an optimizer that has state


def test_state_moves_to_the_drive_and_is_freed(tmp_path: Path) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> list[Tensor]:
        model = make_model()
        optimizer = adamw(model)
        for step in range(6):
            if step == 3:
                inner, optimizer = optimizer, wrap(optimizer)
                assert optimizer is inner or not inner.state
            backward(model, step)
            optimizer.step()
        return values(model)

    assert_same_bits(*both(run, tmp_path))


# -- what cannot be


def test_copies_are_refused(tmp_path: Path) -> None:
    with optstream.offload(adamw(make_model()), tmp_path) as optimizer:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(optstream.OffloadError, match="cannot be copied or pickled"):
                attempt(optimizer)


def test_bits_see_the_sign_of_zero() -> None:
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))
