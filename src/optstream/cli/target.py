"""What a CKPT argument names: an optimizer's checkpoint, or a step of a training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from optstream.cli.parser import given_path
from optstream.errors import CheckpointError

if TYPE_CHECKING:
    from optstream.training.checkpoint import TrainingCheckpoint


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument CKPT."""
    parser.add_argument(
        "checkpoint",
        type=given_path,
        metavar="CKPT",
        help="what optimizer.save made, or a step that optstream train saved",
    )


def open_target(path: Path) -> tuple[Path, TrainingCheckpoint | None]:
    """Return the optimizer's checkpoint, and the training's around it if there is one.

    Raises:
        CheckpointError: neither; a directory of several checkpoints names its newest.
    """
    from optstream.checkpoint.staging import MANIFEST
    from optstream.training.checkpoint import TRAINER, find_checkpoint, step_directories

    if (path / TRAINER).is_file():
        training = find_checkpoint(path)
        return training.optimizer, training
    steps = step_directories(path)
    if steps and not (path / MANIFEST).exists():
        raise CheckpointError(
            f"{path} holds {len(steps)} checkpoints; give one of them, the newest is "
            f"{steps[max(steps)]}"
        )
    return path, None
