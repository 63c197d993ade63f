"""With masters and state on the drive training gives the bits of Megatron without optstream."""

from __future__ import annotations

import itertools
import math

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore.fused_adam import fused_adam
from mcore.gpt import (
    ADAM,
    ADAM_PLAIN,
    DIST_MUON,
    EXPERTS,
    FLOAT32,
    MUON,
    MUON_DEALT,
    MUON_PLAIN,
    Recipe,
    Training,
    varied,
)
from mcore.streaming import assert_nothing_left, assert_same_weights, directory, streamed

STEPS = 10
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
Steps = list[tuple[bool, float, float | None]]


def equal_bits(recipe: Recipe, *flags: str) -> None:
    plain = Training(recipe)
    expected = plain.steps(STEPS)
    plain.sync_params()
    with directory() as path, streamed(recipe, path, *flags) as (training, handle):
        assert_nothing_left(handle)
        steps = training.steps(STEPS)
        training.sync_params()
        assert steps == expected, f"{steps}\n{expected}"
        assert_same_weights(training, plain)
        assert_nothing_left(handle)
        reports = handle.reports.values()
        applied = sum(step[0] for step in steps)
        assert all(report is not None and report.step == applied for report in reports)
        assert any(report is not None and report.num_windows > 1 for report in reports)


def float16_adam() -> None:
    equal_bits(ADAM_PLAIN)


def float16_muon() -> None:
    equal_bits(MUON_PLAIN)


def dist_muon() -> None:
    equal_bits(DIST_MUON)


def muon_dealt() -> None:
    equal_bits(MUON_DEALT)


def muon() -> None:
    equal_bits(MUON)


def muon_lion() -> None:
    equal_bits(varied(MUON, config={"muon_scalar_optimizer": "lion"}))


def muon_duplicated() -> None:
    """Newton-Schulz gathers matrices over tensor-parallel ranks, in the middle of a window."""
    equal_bits(varied(MUON, config={"muon_tp_mode": "duplicated"}))


def muon_distributed() -> None:
    equal_bits(varied(MUON, config={"muon_tp_mode": "distributed"}))


def adam() -> None:
    equal_bits(ADAM)


def adam_fused() -> None:
    with fused_adam():
        equal_bits(ADAM)


def muon_fused() -> None:
    with fused_adam():
        equal_bits(MUON)


def adam_overlapped() -> None:
    equal_bits(varied(ADAM, ddp=OVERLAP))


def muon_overlapped() -> None:
    equal_bits(varied(MUON, ddp=OVERLAP))


def adam_bfloat16_gradients() -> None:
    equal_bits(varied(ADAM, ddp={"grad_reduce_in_fp32": False}))


def adam_bfloat16_gradients_clipped() -> None:
    equal_bits(varied(ADAM, ddp={"grad_reduce_in_fp32": False}, config={"clip_grad": 0.1}))


def adam_float16_gradients() -> None:
    """Loss scaling sees gradients that are never there in float32."""
    model = {"bf16": False, "fp16": True, "params_dtype": torch.float16}
    config = {**model, "initial_loss_scale": 2.0**20, "loss_scale_window": 3, "hysteresis": 1}
    model["pipeline_dtype"] = torch.float16
    equal_bits(varied(ADAM, model=model, config=config, ddp={"grad_reduce_in_fp32": False}))


def muon_bfloat16_gradients() -> None:
    equal_bits(varied(MUON_DEALT, ddp={"grad_reduce_in_fp32": False}))


def adam_experts() -> None:
    equal_bits(varied(ADAM, model=EXPERTS))


def muon_experts() -> None:
    equal_bits(varied(MUON, model=EXPERTS))


def muon_dealt_experts() -> None:
    equal_bits(varied(MUON_DEALT, model=EXPERTS))


def adam_tied() -> None:
    """The first and the last stage of a pipeline share the embedding."""
    equal_bits(varied(ADAM, tied=True))


def muon_tied() -> None:
    equal_bits(varied(MUON, tied=True))


def adam_four_layers() -> None:
    """Enough for two virtual stages on each of two ranks."""
    equal_bits(varied(ADAM, model={"num_layers": 4}))


def muon_dealt_four_layers() -> None:
    equal_bits(varied(MUON_DEALT, model={"num_layers": 4}))


def float32_adam() -> None:
    """There are no masters: what is updated are the parameters themselves."""
    model = {**FLOAT32, "pipeline_dtype": torch.float32}
    equal_bits(varied(ADAM_PLAIN, model=model, config=FLOAT32))
    equal_bits(varied(ADAM, model=model, config=FLOAT32))


def float32_muon() -> None:
    model = {**FLOAT32, "pipeline_dtype": torch.float32}
    equal_bits(varied(MUON_PLAIN, model=model, config=FLOAT32))


def adam_clipped() -> None:
    equal_bits(varied(ADAM, config={"clip_grad": 0.1}))


def muon_clipped() -> None:
    equal_bits(varied(MUON, config={"clip_grad": 0.1}))


def adam_zeros_counted() -> None:
    equal_bits(varied(ADAM, config={"log_num_zeros_in_grad": True}))


def adam_float16() -> None:
    """Half precision with a loss scale that changes."""
    model = {"bf16": False, "fp16": True, "params_dtype": torch.float16}
    config = {**model, "initial_loss_scale": 2.0**20, "loss_scale_window": 3, "hysteresis": 1}
    equal_bits(varied(ADAM, model={**model, "pipeline_dtype": torch.float16}, config=config))


def half_resident() -> None:
    """A part of the state stays in host memory, and causes no traffic."""
    for recipe in (ADAM, MUON):
        plain = Training(recipe)
        expected = plain.steps(4)
        flags = ("--optimizer-state-offload-fraction", "0.5")
        with directory() as path, streamed(recipe, path, *flags) as (training, handle):
            assert training.steps(4) == expected
            assert_same_weights(training, plain)
            plans = [child.streamed.plan for child in handle.children]
            assert any(0 < plan.num_resident < plan.num_windows for plan in plans)
            for child, plan in zip(handle.children, plans, strict=True):
                report = child.streamed.report
                assert report is not None
                assert report.resident_bytes == plan.resident_bytes


def _with_skipped_step(training: Training) -> Steps:
    return [training.step(scale) for scale in (1.0, 1.0, math.inf, 1.0)]


def skipped_step() -> None:
    """A step with infinite gradients changes neither weights nor state nor a counter."""
    for recipe in (ADAM, MUON):
        recipe = varied(recipe, config={"loss_scale": 1.0})
        plain = Training(recipe)
        expected = _with_skipped_step(plain)
        assert [step[0] for step in expected] == [True, True, False, True]
        with directory() as path, streamed(recipe, path) as (training, handle):
            assert _with_skipped_step(training) == expected
            assert_same_weights(training, plain)
            reports = handle.reports.values()
            assert all(report is not None and report.step == 3 for report in reports)


def too_large_norm() -> None:
    """Megatron skips a step whose gradients' norm is above a threshold."""
    recipe = varied(MUON, config={"grad_norm_skip_threshold": 3.0})
    plain = Training(recipe)
    scales = (1.0, 1000.0, 1.0)
    expected = [plain.step(scale) for scale in scales]
    assert [step[0] for step in expected] == [True, False, True]
    with directory() as path, streamed(recipe, path) as (training, _):
        assert [training.step(scale) for scale in scales] == expected
        assert_same_weights(training, plain)


def _scheduled(training: Training) -> Steps:
    schedule = OptimizerParamScheduler(
        training.optimizer,
        init_lr=0.0,
        max_lr=5e-3,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=6,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.3,
        wd_incr_steps=6,
        wd_incr_style="linear",
    )
    steps = []
    for _ in range(6):
        steps.append(training.step())
        schedule.step(increment=1)
    return steps


def scheduled() -> None:
    """Megatron's scheduler changes learning rate and weight decay of every group at every step."""
    for recipe in (ADAM, MUON):
        plain = Training(recipe)
        expected = _scheduled(plain)
        with directory() as path, streamed(recipe, path) as (training, _):
            assert _scheduled(training) == expected
            assert_same_weights(training, plain)


def _reloaded(training: Training) -> Steps:
    steps = training.steps(2)
    with torch.no_grad():
        for param in itertools.islice(training.ddp.parameters(), 4):
            param.mul_(0.5)
    training.optimizer.reload_model_params()
    return steps + training.steps(2)


def reloaded() -> None:
    """`reload_model_params` makes all masters anew from the weights."""
    for recipe in (ADAM, MUON):
        plain = Training(recipe)
        expected = _reloaded(plain)
        with directory() as path, streamed(recipe, path) as (training, handle):
            assert _reloaded(training) == expected
            assert_same_weights(training, plain)
            assert_nothing_left(handle)


def set_up_late() -> None:
    """What an optimizer did before `setup` moves to the drive with it."""
    for recipe in (ADAM, MUON_DEALT):
        plain = Training(recipe)
        expected = plain.steps(4)
        with directory() as path, streamed(recipe, path, steps_before=2) as (training, handle):
            assert_nothing_left(handle)
            assert training.steps(2) == expected[2:]
            assert_same_weights(training, plain)
