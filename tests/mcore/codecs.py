"""State in fewer bytes: `split` changes no bit, the others go on from what they saved."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import torch

from mcore.checkpoints import BY_RANK, FULLY, interchangeable, load, save
from mcore.fused_adam import fused_adam
from mcore.gpt import ADAM, DIST_MUON, FLOAT32, MUON, MUON_DEALT, Recipe, Training, varied
from mcore.parity import OVERLAP, equal_bits
from mcore.streaming import assert_nothing_left, assert_same_weights, directory, streamed

DTYPE = "--stream-optimizer-state-moment-dtype"
SPLIT = (DTYPE, "split")
BEFORE = 3


def split_dist_muon() -> None:
    equal_bits(DIST_MUON, *SPLIT)


def split_muon() -> None:
    equal_bits(varied(MUON, ddp=OVERLAP), *SPLIT)


def split_adam() -> None:
    """Shards of DDP's buffer start at any byte of a parameter."""
    equal_bits(varied(ADAM, ddp={"grad_reduce_in_fp32": False}), *SPLIT)


def split_checkpoints() -> None:
    interchangeable(MUON_DEALT, FULLY, True, *SPLIT)


def split_checkpoints_by_rank() -> None:
    with fused_adam():
        interchangeable(ADAM, BY_RANK, True, *SPLIT)


def split_of_nothing() -> None:
    """A rank may have been dealt parameters in float32 only, which have no masters to split."""
    model = {**FLOAT32, "pipeline_dtype": torch.float32}
    recipe = varied(ADAM, model=model, config=FLOAT32)
    with (
        mock.patch("optstream.integrations.megatron.setup.validate"),
        directory() as path,
        streamed(recipe, path, *SPLIT) as (training, _),
    ):
        assert training.steps(2) == Training(recipe).steps(2)


def _stored(recipe: Recipe, dtype: str, sharding: str, most_bytes: float) -> None:
    """Train, save in Megatron's way and in our own; what loads either goes on with the same bits.

    Megatron without optstream loads it as well, and takes the same next step: the checkpoint has
    the values that this step is made from, in float32.
    """
    other = varied(recipe, seed=999)
    with directory() as path, streamed(recipe, path / "state", DTYPE, dtype) as (training, handle):
        losses = [loss for _, loss, _ in training.steps(BEFORE)]
        for child in handle.children:
            num_params = sum(spec.numel for spec in child.streamed.plan.params)
            assert child.streamed.plan.state_bytes <= most_bytes * num_params, child.label
        save(training, path / "megatron", sharding)
        handle.save(path / "own")
        saved = training.weights()
        expected = training.steps(1)
        weights = training.weights()
        expected += training.steps(1)
        assert_nothing_left(handle)
        losses += [loss for _, loss, _ in expected]
        assert losses == sorted(losses, reverse=True), losses
        _goes_on_alone(other, path / "megatron", sharding, expected, weights)
        with streamed(other, path / "state", DTYPE, dtype, role="a") as (resumed, _):
            load(resumed, path / "megatron", sharding)
            assert resumed.steps(2) == expected
            assert_same_weights(resumed, training)
        with streamed(other, path / "state", DTYPE, dtype, role="b") as (resumed, again):
            resumed.load_weights(saved)
            again.load(path / "own")
            assert resumed.steps(2) == expected
            assert_same_weights(resumed, training)


def _goes_on_alone(
    recipe: Recipe,
    path: Path,
    sharding: str,
    expected: list[tuple[bool, float, float | None]],
    weights: dict[str, torch.Tensor],
) -> None:
    plain = Training(recipe)
    load(plain, path, sharding)
    assert plain.steps(1) == expected[:1]
    assert all(torch.equal(value, weights[name]) for name, value in plain.weights().items())


def adam_int8() -> None:
    with fused_adam():
        _stored(ADAM, "int8", BY_RANK, 4.3)


def adam_bf16() -> None:
    with fused_adam():
        _stored(ADAM, "bf16", FULLY, 6.1)


def muon_int8() -> None:
    _stored(MUON_DEALT, "int8", FULLY, 4.3)


def dist_muon_bf16() -> None:
    _stored(DIST_MUON, "bf16", FULLY, 6.1)


def taken_from_float32() -> None:
    """What Megatron saved without optstream is stored in fewer bytes from then on."""
    with directory() as path:
        plain = Training(MUON_DEALT)
        plain.steps(BEFORE)
        save(plain, path / "plain", FULLY)
        [expected] = plain.steps(1)
        with streamed(varied(MUON_DEALT, seed=999), path, DTYPE, "int8") as (training, _):
            load(training, path / "plain", FULLY)
            first, second = training.steps(2)
            assert first == expected  # its loss and norm are those of the weights that were saved
            assert math.isfinite(second[1])
            assert second[1] < first[1]


def around_a_step() -> None:
    """Skipped steps, a reload of weights and state that was there before, with split masters."""
    recipe = varied(ADAM, config={"loss_scale": 1.0})
    results = []
    for flags in ((), SPLIT):
        with directory() as path, streamed(recipe, path, *flags, steps_before=1) as (training, _):
            steps = [training.step(scale) for scale in (1.0, math.inf, 1.0)]
            with torch.no_grad():
                next(training.ddp.parameters()).mul_(0.5)
            training.optimizer.reload_model_params()
            results.append((steps + training.steps(1), training.weights()))
    (expected, weights), (found, split) = results
    assert found == expected
    assert all(torch.equal(value, split[name]) for name, value in weights.items())
