"""The flags, and what they come to."""

from __future__ import annotations

import argparse
import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optstream.codecs import EXACT, SPLIT
from optstream.distributed.place import check_role
from optstream.errors import ConfigError

_FILES = (
    "Its files have no names: they show in `df` and not in `du`; `optstream ls DIR` lists them "
    "with the processes that hold them, and they are gone when those end, however they end."
)
_STORED = (
    "Per parameter that a rank keeps, in bytes: adam 12 (float32 master, two moments); muon and "
    "dist_muon 8 for matrices (master, momentum), 12 for embeddings, norms and outputs; fewer with "
    "--stream-optimizer-state-moment-dtype."
)
FP32 = "fp32"
MOMENT_DTYPES = (FP32, SPLIT, "bf16", "int8")
DEFAULTS = {
    "offload_train_disk_dir": None,
    "offload_train_disk_chunk_mb": 256,
    "optimizer_state_offload_fraction": 1.0,
    "stream_optimizer_state_moment_dtype": FP32,
    "stream_optimizer_state_metrics_dir": None,
}
"""Of the flags that do nothing without the switch."""

_ENCODED = (
    "How state is stored, in all optimizers. fp32: as the optimizer computes it. split: the same "
    "bits, masters of bfloat16 parameters in 2 bytes beside the parameter (adam 10 bytes a "
    "parameter, matrices of muon and dist_muon 6). bf16 and int8 (scaled by blocks of 128): split "
    "masters, and adam's two moments or muon's momentum in 2 bytes or 1 (bf16: adam 6, muon 4; "
    "int8: adam 4.1, muon 3.1). Megatron's checkpoints are in float32 with all of them."
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of state on the drive to Megatron's parser."""
    group = parser.add_argument_group(title="optimizer state on the drive")
    group.add_argument(
        "--stream-optimizer-state-to-disk",
        action="store_true",
        help="Keep float32 masters and optimizer state in files and stream them through a few "
        f"buffers in each step, for adam, muon and dist_muon. {_STORED}",
    )
    group.add_argument(
        "--offload-train-disk-dir",
        metavar="DIR",
        help="A directory on a local drive. Without it $SCRATCH/USER/optstream is used. Each role "
        f"and rank has a directory of its own in it. {_FILES}",
    )
    group.add_argument(
        "--offload-train-disk-chunk-mb",
        type=int,
        metavar="MIB",
        help="Size of a window in MiB (256 if not given): state in memory together. Each optimizer "
        "(Muon has Adam beside it) uses about four windows of host memory and two on the "
        "accelerator.",
    )
    group.add_argument(
        "--optimizer-state-offload-fraction",
        type=float,
        metavar="F",
        help="The part of the state that is streamed; the rest, in whole windows, stays in host "
        "memory between steps and causes no traffic. Above 0, at most 1.",
    )
    group.add_argument(
        "--stream-optimizer-state-moment-dtype",
        metavar=f"{{{','.join(MOMENT_DTYPES)}}}",
        help=_ENCODED,
    )
    group.add_argument(
        "--stream-optimizer-state-metrics-dir",
        metavar="DIR",
        help="Write a JSONL file for each rank and optimizer there, with one line a step: bytes "
        "read and written, seconds waited, memory.",
    )
    parser.set_defaults(**DEFAULTS)
    return parser


@dataclass(frozen=True)
class Storage:
    """How an optimizer's state is stored, in the terms of `offload`."""

    window: int
    ram: str
    codec: str


def storage(args: Any) -> Storage:
    """Return what the flags come to."""
    return Storage(window_bytes(args), resident_share(args), codec(args))


def codec(args: Any) -> str:
    """Return the codec, of which `fp32` is Megatron's way of saying exact."""
    dtype = getattr(args, "stream_optimizer_state_moment_dtype", FP32)
    return EXACT if dtype == FP32 else str(dtype)


def window_bytes(args: Any) -> int:
    """Return the size of a window."""
    return int(args.offload_train_disk_chunk_mb) * 2**20


def resident_share(args: Any) -> str:
    """Return the part of the state that stays in memory, as `offload(ram=)` takes it."""
    return f"{100 * (1 - args.optimizer_state_offload_fraction):.6f}%"


def state_directory(args: Any, role: str, rank: int) -> Path:
    """Return where a rank's state goes.

    Raises:
        ConfigError: no directory is known, or a role that cannot be part of a name.
    """
    check_role(role)
    base = given_directory(args)
    parts = [role] if role else []
    return base.joinpath(*parts, f"rank{rank:05d}")


def given_directory(args: Any) -> Path:
    """Return the directory given, or the user's own under $SCRATCH.

    Raises:
        ConfigError: neither is there.
    """
    given = getattr(args, "offload_train_disk_dir", None)
    if given:
        return Path(given)
    scratch = os.environ.get("SCRATCH")
    if not scratch:
        raise ConfigError(
            "--stream-optimizer-state-to-disk needs a place: $SCRATCH is not set and no "
            "--offload-train-disk-dir is given; give a directory on a local drive"
        )
    return Path(scratch) / getpass.getuser() / "optstream"
