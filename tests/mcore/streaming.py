"""A training whose optimizers were given to `setup`, and what must hold of it. For tests only."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore.gpt import Recipe, Training
from optstream.integrations.megatron import Streamed, add_arguments, setup

WINDOW_BYTES = 64 * 2**10
"""Smaller than the flag allows, so that the tiny model has several windows."""


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Give all ranks the same new directory."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    try:
        yield Path(found[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(found[0], ignore_errors=True)


def arguments(recipe: Recipe, path: Path, *more: str) -> Any:
    """Return Megatron's arguments as far as they matter here."""
    parser = add_arguments(argparse.ArgumentParser())
    flags = ["--stream-optimizer-state-to-disk", "--offload-train-disk-dir", str(path), *more]
    args = parser.parse_args(flags)
    args.optimizer = recipe.optimizer
    args.bf16 = recipe.model.get("bf16", True)
    args.use_distributed_optimizer = recipe.distributed
    args.use_layer_wise_distributed_optimizer = recipe.layer_wise
    return args


@contextlib.contextmanager
def streamed(
    recipe: Recipe,
    path: Path,
    *more: str,
    window_bytes: int = WINDOW_BYTES,
    steps_before: int = 0,
    role: str = "",
) -> Iterator[tuple[Training, Streamed]]:
    training = Training(recipe)
    training.steps(steps_before)
    with mock.patch(
        "optstream.integrations.megatron.arguments.window_bytes", return_value=window_bytes
    ):
        handle = setup(arguments(recipe, path, *more), training.optimizer, role)
    assert handle is not None
    try:
        yield training, handle
    finally:
        handle.close()


def assert_same_weights(one: Training, other: Training) -> None:
    ours, theirs = one.weights(), other.weights()
    different = [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} differ, first {different[0]}"


def assert_nothing_left(handle: Streamed) -> None:
    """No master has storage of its own, no state is anywhere but on the drive."""
    for child in handle.children:
        assert not child._inner.state
        held = [one for group in child._held for one in group if one.has_master]
        assert all(one.tensor.untyped_storage().nbytes() <= 4 for one in held)
