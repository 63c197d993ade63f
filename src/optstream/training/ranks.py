"""The ranks that torchrun started; without it, one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from optstream.distributed.ranks import Ranks
from optstream.errors import ConfigError
from optstream.training.config import TrainConfig


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """Join the other processes of a torchrun, if there are any, for the length of a block."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Ranks(None)
        return
    dist.init_process_group("gloo")
    ranks = Ranks(dist.group.WORLD)
    yield ranks
    # only after success: where a rank failed, its end is what ends the others' waiting
    ranks.close()
    dist.destroy_process_group()


def process_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return what `offload` takes."""
    return dist.group.WORLD if ranks.size > 1 else None


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: says what.
    """
    if config.batch_size % ranks.size:
        raise ConfigError(
            f"--batch-size {config.batch_size} cannot be shared evenly by {ranks.size} ranks; give "
            f"a multiple of {ranks.size}"
        )
