"""Encoded state of shards: `split` has the bits of `exact`, `int8` the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optstream
from distributed.programs import differing
from distributed.test_shards import MAKES, Ranks, backward, locals_of, sharded

STEPS = 4


def steps(
    directory: Path, name: str, codec: str, *, changes: bool = False, window: str = "64KiB"
) -> tuple[dict[str, Tensor], int, int]:
    """Return a rank's parts after steps, the bytes of its state, and how many windows it has.

    Args:
        changes: something else doubles a rank's largest part between steps.
    """
    model = sharded(torch.bfloat16, (dist.get_world_size(),))
    options = {"window": window, "codec": codec, "process_group": dist.group.WORLD}
    with optstream.offload(MAKES[name](model), directory, model=model, **options) as opt:
        for step in range(STEPS):
            if changes and step == 2:
                weight = model.embedding.weight.detach().to_local()  # type: ignore[union-attr]
                weight.mul_(2)
            backward(model, step, dist.get_rank())
            opt.step()
        return locals_of(model), opt.plan.state_bytes, opt.plan.num_windows


def split_or_exact(directory: Path) -> list[str]:
    """Return where `split` differs from `exact`, or does not save what it should."""
    wrong = []
    for name in MAKES:
        for changes in (False, True):
            exact, exact_bytes, _ = steps(directory, name, "exact", changes=changes)
            split, split_bytes, num_windows = steps(directory, name, "split", changes=changes)
            case = f"{name} changes: {changes}"
            wrong += [f"{case} {key}" for key in differing(exact, split)]
            numel = sum(part.numel() // 2 for part in exact.values())
            if not 1.9 * numel < exact_bytes - split_bytes <= 2 * numel or num_windows < 2:
                wrong.append(f"{case} has {split_bytes} bytes for {exact_bytes} of {numel}")
    return wrong


def test_split_has_the_bits_of_exact(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, split_or_exact, tmp_path) == [[], []]


def int8_again(directory: Path, codec: str) -> tuple[list[str], list[str], bool]:
    """Return what differs between two runs, what differs with other windows, and if all is finite.

    Rows do not divide evenly: of 65 and of 5 one rank has more, of 1 one rank has none.
    """
    first, _, num_windows = steps(directory, "adamw", codec)
    again, _, _ = steps(directory, "adamw", codec)
    other, _, fewer = steps(directory, "adamw", codec, window="1MiB")
    assert fewer < num_windows
    finite = all(bool(part.view(torch.bfloat16).isfinite().all()) for part in first.values())
    return differing(first, again), differing(first, other), finite


@pytest.mark.parametrize("codec", ["int8", "bf16-stochastic"])
def test_rounded_state_is_the_same_every_time(ranks: Ranks, tmp_path: Path, codec: str) -> None:
    assert ranks(2, int8_again, tmp_path, codec) == [([], [], True)] * 2
