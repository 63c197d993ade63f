"""Training checkpoints: one directory a step, there whole or not at all.

    SAVE_DIR/                  locked by the run that saves in it
      step000050/
        optimizer/             the optimizer's checkpoint: links to the files of its state
        model.safetensors      the weights
        trainer.json           step, settings, generator, digests
      step000100.tmp/          being written; step000010.old/ about to go

Ordering: all three are on the drive, then the name, then older checkpoints go. What a killed run
left half-made or half-gone is removed by the next run that saves there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from optstream import durable
from optstream.distributed.ranks import Ranks
from optstream.errors import CheckpointError, ConfigError, OutOfSpaceError
from optstream.mounts import read_free_bytes
from optstream.store.checks import remove_directories
from optstream.training.trainer_state import TrainerState, read_trainer_state
from optstream.training.updater import Updater
from optstream.training.weights import file_digest, save_weights
from optstream.units import format_bytes

OPTIMIZER = "optimizer"
WEIGHTS = "model.safetensors"
TRAINER = "trainer.json"
_NAME = re.compile(r"step(\d{6,})")


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A step's directory and what its trainer.json says."""

    path: Path
    state: TrainerState

    @property
    def optimizer(self) -> Path:
        return self.path / OPTIMIZER

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS


def find_checkpoint(path: Path) -> TrainingCheckpoint:
    """Open a step's directory, or the newest one of a directory that was saved in.

    Raises:
        CheckpointError: neither.
        FormatError: its trainer.json is damaged or newer.
    """
    if not (path / TRAINER).is_file():
        steps = step_directories(path)
        if not steps:
            raise CheckpointError(
                f"{path} holds no training checkpoint (a directory such as step000050 with a "
                f"{TRAINER}); give what --save-dir wrote"
            )
        path = steps[max(steps)]
    return TrainingCheckpoint(path, read_trainer_state(path / TRAINER))


def step_directories(path: Path) -> dict[int, Path]:
    """Return the whole checkpoints in a directory by their step."""
    if not path.is_dir():
        return {}
    named = ((_NAME.fullmatch(child.name), child) for child in path.iterdir())
    return {int(m[1]): child for m, child in named if m and (child / TRAINER).is_file()}


def check_weights(checkpoint: TrainingCheckpoint) -> None:
    """Raise CheckpointError unless the weights are the bytes that were saved."""
    try:
        found = file_digest(checkpoint.weights)
    except OSError as error:
        raise CheckpointError(f"{checkpoint.weights} cannot be read: {error.strerror}") from error
    if found != checkpoint.state.weights_xxh3:
        raise CheckpointError(
            f"{checkpoint.weights} is not what was saved: its digest is {found}, not "
            f"{checkpoint.state.weights_xxh3}; take another checkpoint"
        )


def check_save_directory(path: Path, resumed: TrainingCheckpoint | None) -> None:
    """Refuse a directory whose checkpoints belong to another run; makes nothing.

    Raises:
        ConfigError: a file, or with checkpoints that this run does not follow, or with something
            else where a checkpoint is to be.
    """
    existing = next(
        place for place in (path.absolute(), *path.absolute().parents) if place.exists()
    )
    if not existing.is_dir():
        raise ConfigError(f"save directory {path}: {existing} is a file; give a directory")
    steps = step_directories(path)
    for child in path.iterdir() if existing == path.absolute() else ():
        if _NAME.fullmatch(child.name) and child not in steps.values() and not _is_empty(child):
            raise ConfigError(
                f"save directory {path} has {child.name}, which is no checkpoint of optstream "
                f"train: it has no {TRAINER}; move it away, or give another directory"
            )
    if not steps:
        return
    newest = steps[max(steps)]
    if resumed is None:
        raise ConfigError(
            f"save directory {path} has checkpoints of another run, {newest.name} for one; give "
            f"an empty directory, or go on with --resume {path}"
        )
    if not any(child.samefile(resumed.path) for child in steps.values()):
        raise ConfigError(
            f"save directory {path} has checkpoints of another run than {resumed.path}; give an "
            "empty directory"
        )
    if max(steps) > resumed.state.step:
        raise ConfigError(
            f"save directory {path} has {newest.name}, which is later than {resumed.path}; "
            "remove what is later, or give an empty directory"
        )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


class Saves:
    """The checkpoints that one run makes, on all its ranks together.

    Attributes:
        num_saved: checkpoints made.
    """

    def __init__(self, directory: Path, keep: int | None, ranks: Ranks) -> None:
        self._directory = directory
        self._ranks = ranks
        self._keep = keep
        self.num_saved = 0

    def check_room(self, num_checkpoints: int, checkpoint_bytes: int) -> None:
        """Raise OutOfSpaceError unless the drive holds all that will be there at once.

        A checkpoint moves no state, but the state's next writes go to fresh files: each one that is
        kept is one more generation.
        """
        if self._keep is not None:
            num_checkpoints = min(num_checkpoints, self._keep + 1)
        free_bytes = read_free_bytes(self._directory)
        needed_bytes = num_checkpoints * checkpoint_bytes
        if needed_bytes > free_bytes:
            raise OutOfSpaceError(
                errno.ENOSPC,
                f"{num_checkpoints} checkpoints of {format_bytes(checkpoint_bytes)} at once need "
                f"{format_bytes(needed_bytes)}, {self._directory} has {format_bytes(free_bytes)} "
                "free; give a smaller --keep, a larger --save-every, or another drive",
            )

    def save(self, state: TrainerState, module: torch.nn.Module, updater: Updater) -> float:
        """Make a checkpoint, then remove those that are not to be kept; return the seconds.

        Raises:
            StoreError: it could not be made; older ones are as they were.
        """
        start = time.perf_counter()
        path = self._directory / f"step{state.step:06d}"
        staging = path.with_name(path.name + durable.TEMPORARY)
        try:
            with self._ranks.together():
                if self._ranks.rank == 0:
                    staging.mkdir(mode=0o700)
                updater.save(staging / OPTIMIZER)
                if self._ranks.rank == 0:
                    self._complete(state, module, staging, path)
        except OSError as error:
            raise durable.failed("save", path, error) from error
        finally:
            if self._ranks.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
        self.num_saved += 1
        return time.perf_counter() - start

    def _complete(
        self, state: TrainerState, module: torch.nn.Module, staging: Path, path: Path
    ) -> None:
        digest = save_weights(module, staging / WEIGHTS)
        complete = TrainerState(**{**vars(state), "weights_xxh3": digest})
        durable.write_file(staging / TRAINER, complete.to_json())
        durable.sync(staging)
        staging.rename(path)
        durable.sync(self._directory)
        self._prune()

    def _prune(self) -> None:
        steps = step_directories(self._directory)
        for step in sorted(steps)[: -self._keep] if self._keep is not None else ():
            durable.remove_directory(steps[step])
        durable.sync(self._directory)


@contextlib.contextmanager
def open_saves(directory: Path, keep: int | None, ranks: Ranks) -> Iterator[Saves]:
    """Make and lock a directory to save in; what a killed run left half-made is removed.

    Rank 0 does that for all.

    Raises:
        ConfigError: it cannot be made, or another run saves in it.
    """
    if ranks.rank > 0:
        yield Saves(directory, keep, ranks)
        return
    try:
        made = durable.make_directories(directory.absolute())
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"save directory {directory} cannot be made: {error.strerror}; give another --save-dir"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another run saves in {directory}; give another --save-dir"
            ) from error
        for child in directory.iterdir():
            dead = child.suffix in (durable.TEMPORARY, durable.DOOMED)
            if dead and _NAME.fullmatch(child.stem):
                shutil.rmtree(child)
        yield Saves(directory, keep, ranks)
    finally:
        os.close(lock)
        remove_directories(made)  # a run that saved nothing leaves nothing
