"""Show what is in a checkpoint, and where its bytes are; none of them is read but the manifest."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optstream.cli import target
from optstream.cli.table import align
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.checkpoint.snapshot import Snapshot
    from optstream.training.checkpoint import TrainingCheckpoint

SUMMARY = "show what is in a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    target.add_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the tables or the object, and return the exit code."""
    from optstream.checkpoint.directory import open_checkpoint

    optimizer, training = target.open_target(args.checkpoint)
    facts = describe(open_checkpoint(optimizer.absolute()), training)
    text = json.dumps(facts, indent=1) if args.json else _tables(facts)
    sys.stdout.write(text + "\n")
    return 0


def describe(snapshot: Snapshot, training: TrainingCheckpoint | None) -> dict[str, Any]:
    """Return everything that is shown, as JSON holds it."""
    from optstream.checkpoint.values import encode

    manifest = snapshot.manifest
    steps = {} if training is None else {"training": _training(training)}
    return {
        "path": str(snapshot.directory),
        "optimizer": manifest.optimizer,
        "step": manifest.step if training is None else training.state.step,
        "format_version": manifest.version,
        "state_bytes": snapshot.state_bytes,
        "file_bytes": snapshot.file_bytes,
        "windows": _windows(snapshot),
        "param_groups": [
            {key: encode(value, key) for key, value in group.items()} for group in manifest.groups
        ],
        "params": _params(snapshot),
        **steps,
    }


def _training(training: TrainingCheckpoint) -> dict[str, Any]:
    return {
        "path": str(training.path),
        "settings": training.state.settings,
        "tokens": training.state.tokens,
        "held_out_loss_before": training.state.loss_before,
        "weights_bytes": training.weights.stat().st_size,
        "versions": training.state.versions,
    }


def _windows(snapshot: Snapshot) -> list[dict[str, Any]]:
    rows = []
    for index, file in snapshot.files.items():
        stat = os.fstat(file.fd)
        rows.append(
            {
                "file": snapshot.manifest.windows[index].file,
                "bytes": stat.st_size,
                "allocated_bytes": stat.st_blocks * 512,
                "links": stat.st_nlink,
            }
        )
    return rows


def _params(snapshot: Snapshot) -> dict[str, Any]:
    return {
        name: {
            "shape": list(param.shape),
            "dtype": str(param.dtype).removeprefix("torch."),
            "states": {
                key: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "codec": tensor.codec,
                    "bytes": tensor.stored_bytes,
                    "windows": sorted({piece.window for piece in tensor.pieces}),
                    "shards": [
                        {"shape": list(shard.region.shape), "ranges": shard.region.ranges}
                        for shard in tensor.shards
                    ],
                }
                for key, tensor in param.tensors.items()
            },
            "kept": sorted(param.kept),
        }
        for name, param in snapshot.manifest.params.items()
    }


def _tables(facts: dict[str, Any]) -> str:
    return "\n\n".join([_head(facts), _state_table(facts), _param_table(facts)])


def _head(facts: dict[str, Any]) -> str:
    windows = facts["windows"]
    shared = sum(window["links"] > 1 for window in windows)
    allocated = format_bytes(sum(window["allocated_bytes"] for window in windows))
    rows = [
        ("checkpoint", facts["path"]),
        ("optimizer", facts["optimizer"]),
        ("step", str(facts["step"])),
        ("format", f"version {facts['format_version']}"),
        ("state", format_bytes(facts["state_bytes"])),
        (
            "windows",
            f"{len(windows)} files, {allocated} on the drive, {shared} shared with other "
            "checkpoints or a running optimizer",
        ),
    ]
    if training := facts.get("training"):
        names = ("model", "dtype", "optimizer", "lr", "steps", "batch_size", "seq_len", "seed")
        settings = ", ".join(f"{name} {training['settings'][name]}" for name in names)
        versions = ", ".join(f"{name} {value}" for name, value in training["versions"].items())
        rows += [
            ("training", settings),
            ("tokens", training["tokens"]),
            ("weights", format_bytes(training["weights_bytes"])),
            ("saved by", versions),
        ]
    return align(rows)


def _state_table(facts: dict[str, Any]) -> str:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for param in facts["params"].values():
        for key, state in param["states"].items():
            total = totals.setdefault((key, state["dtype"], state["codec"]), [0, 0])
            total[0] += 1
            total[1] += state["bytes"]
    rows = [("state", "dtype", "codec", "parameters", "bytes")]
    for (key, dtype, codec), (count, num_bytes) in totals.items():
        rows.append((key, dtype, codec, str(count), format_bytes(num_bytes)))
    return align(rows)


def _param_table(facts: dict[str, Any]) -> str:
    rows = [("parameter", "shape", "dtype", "states", "in memory", "bytes", "shards", "windows")]
    for name, param in facts["params"].items():
        states = param["states"]
        windows = sorted({window for state in states.values() for window in state["windows"]})
        rows.append(
            (
                name,
                "x".join(map(str, param["shape"])),
                param["dtype"],
                " ".join(states),
                " ".join(param["kept"]),
                format_bytes(sum(state["bytes"] for state in states.values())),
                str(max((len(state["shards"]) for state in states.values()), default=0)),
                _span(windows),
            )
        )
    return align(rows)


def _span(windows: Sequence[int]) -> str:
    if not windows:
        return "-"
    return str(windows[0]) if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
