"""A checkpoint as files that need no optstream: one torch file, or ordinary safetensors files.

Tensors are mapped from the checkpoint's files and written from there, so the memory this takes does
not grow with the state.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from optstream import durable
from optstream.checkpoint import directory
from optstream.checkpoint.snapshot import Snapshot
from optstream.checkpoint.values import encode
from optstream.codecs import EXACT, SPLIT
from optstream.errors import ConfigError, OutOfSpaceError, StoreError
from optstream.mounts import read_free_bytes
from optstream.plan import MASTER
from optstream.units import format_bytes

log = logging.getLogger("optstream")
TORCH_SUFFIXES = (".pt", ".pth")
INDEX = "index.json"
FORMAT = "optstream export"
_FILE = re.compile(rf"{re.escape(INDEX)}|state-\d{{5}}-of-\d{{5}}\.safetensors", re.ASCII)
_START_BYTES = 100
FILE_BYTES = 2**30
"""Most tensor bytes in one safetensors file, unless one tensor is larger."""


def export(checkpoint: Path, target: Path, *, force: bool = False) -> int:
    """Write a checkpoint's state for other programs; every byte is checked first.

    A target that ends in .pt or .pth becomes one file for `torch.load(weights_only=True)`: a
    `state_dict` that the plain optimizer loads, and under "masters" the float32 masters by
    parameter name, if there are any. Another target becomes a directory: safetensors files with
    tensors named `FQN/state`, masters as `FQN/master`, and an index.json that says which file each
    is in, with the param_groups and the values that are no tensors.

    Args:
        checkpoint: what `StreamedOptimizer.save` made.
        target: a file or directory; it appears when it is whole.
        force: replace a file, or a directory that an export made. An older one is removed when the
            new one is whole.

    Returns:
        The bytes of tensors that were written.

    Raises:
        ConfigError: the target cannot be used.
        CheckpointError, FormatError, WindowReadError: the checkpoint is damaged.
        OutOfSpaceError, StoreError: the target cannot be written.
    """
    _check_target(target, force)
    snapshot = directory.open_checkpoint(checkpoint)
    _report_split(checkpoint, snapshot)
    exported_bytes, copied_bytes = _exported_bytes(snapshot)
    _check_space(target, exported_bytes + copied_bytes)
    directory.verify(snapshot)
    staging = target.with_name(target.name + durable.TEMPORARY)
    write = _write_torch if target.suffix.lower() in TORCH_SUFFIXES else _write_safetensors
    try:
        write(snapshot, staging)
        _commit(staging, target, force)
    except (OSError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
        raise durable.failed("export to", target, cause) from error
    finally:
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            staging.unlink(missing_ok=True)
    return exported_bytes


def _report_split(checkpoint: Path, snapshot: Snapshot) -> None:
    params = snapshot.manifest.params.values()
    split = [tensor for p in params for tensor in p.tensors.values() if tensor.codec == SPLIT]
    if split:
        log.warning(
            "%s: %d masters are split, so they are whole only with the model's weights: the export "
            "leaves them out, and has the rest of the state",
            checkpoint,
            len(split),
        )


def _exported_bytes(snapshot: Snapshot) -> tuple[int, int]:
    """Return the bytes of what is written, and of what is decoded and put together for that."""
    exported = copied = 0
    for param in snapshot.manifest.params.values():
        for tensor in param.tensors.values():
            if tensor.codec == SPLIT:
                continue
            exported += tensor.num_bytes
            copies = (tensor.codec != EXACT) + (not tensor.is_whole)
            copied += copies * tensor.num_bytes
    return exported, copied


def _check_target(target: Path, force: bool) -> None:
    if target.name in ("", ".."):
        raise ConfigError(f"cannot export to {target}: it has no name of its own; give a new path")
    staging = target.with_name(target.name + durable.TEMPORARY)
    if not target.parent.is_dir():
        raise ConfigError(f"cannot export to {target}: {target.parent} is missing; make it first")
    if target.suffix == ".safetensors":
        raise ConfigError(
            f"cannot export to {target}: an export is several safetensors files; give a directory, "
            "or a file that ends in .pt"
        )
    if os.path.lexists(staging):
        raise ConfigError(
            f"{staging} is there: another export writes it, or one was killed; wait, or remove it"
        )
    if not os.path.lexists(target):
        return
    if not force:
        raise ConfigError(f"{target} is there; give another path, or --force to replace it")
    wants_file = target.suffix.lower() in TORCH_SUFFIXES
    if wants_file != target.is_file() or not (wants_file or _is_export(target)):
        raise ConfigError(f"{target} is no export, so it is not replaced; give another path")


def _is_export(target: Path) -> bool:
    """Tell whether it is a directory that an export made, with nothing else in it."""
    if not (target / INDEX).is_file():
        return False
    if not all(_FILE.fullmatch(child.name) for child in target.iterdir()):
        return False
    return f'"format": "{FORMAT}"'.encode() in (target / INDEX).read_bytes()[:_START_BYTES]


def _check_space(target: Path, needed_bytes: int) -> None:
    free_bytes = read_free_bytes(target.parent)
    if needed_bytes > free_bytes:
        raise OutOfSpaceError(
            errno.ENOSPC,
            f"the export needs {format_bytes(needed_bytes)}, {target.parent} has "
            f"{format_bytes(free_bytes)} free; free space, or give another drive",
        )


def _write_torch(snapshot: Snapshot, staging: Path) -> None:
    os.close(os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        torch.save(_state_dict(snapshot, staging.parent), staging)
    except RuntimeError as error:  # how torch's writer reports a full or failing drive
        raise StoreError(errno.EIO, f"cannot write {staging}: {error}") from error
    durable.sync(staging)


def _state_dict(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Return the state as the plain optimizer has it, parameters numbered in group order."""
    numbers: dict[str, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(name, len(numbers)) for name in group["params"]]}
        for group in snapshot.manifest.groups
    ]
    states: dict[int, dict[str, Any]] = {}
    masters: dict[str, Tensor] = {}
    for name, number in numbers.items():
        state = snapshot.state(name, None, folder)
        if MASTER in state:
            masters[name] = state.pop(MASTER)
        if state:
            states[number] = state
    return {
        "state": states,
        "param_groups": groups,
        **({"masters": masters} if masters else {}),
    }


def _write_safetensors(snapshot: Snapshot, staging: Path) -> None:
    staging.mkdir(mode=0o700)
    shards = list(_shards(snapshot))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"state-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            f"{name}/{key}": _tensor(snapshot, name, key, staging.parent) for name, key in names
        }
        save_file(tensors, staging / file, metadata={"format": "pt"})
        (staging / file).chmod(0o600)
        durable.sync(staging / file)
        places.update(dict.fromkeys(tensors, file))
    index = json.dumps(_index(snapshot, places), indent=1)
    durable.write_file(staging / INDEX, index.encode() + b"\n")
    durable.sync(staging)


def _tensor(snapshot: Snapshot, name: str, key: str, folder: Path) -> Tensor:
    tensor = snapshot.tensor(name, key, folder)
    if tensor.is_complex():
        raise ConfigError(
            f"{name}/{key} is {tensor.dtype}, which safetensors cannot hold; export to a .pt file"
        )
    return tensor.contiguous()


def _shards(snapshot: Snapshot) -> Iterator[list[tuple[str, str]]]:
    """Yield (name, key) of tensors, file by file."""
    shard: list[tuple[str, str]] = []
    num_bytes = 0
    for name in snapshot.manifest.params:
        stored = snapshot.manifest.params[name].tensors
        for key, value in snapshot.outline(name).items():
            is_split = key in stored and stored[key].codec == SPLIT
            if is_split or not isinstance(value, Tensor):
                continue
            if shard and num_bytes + value.nbytes > FILE_BYTES:
                yield shard
                shard, num_bytes = [], 0
            shard.append((name, key))
            num_bytes += value.nbytes
    if shard:
        yield shard


def _index(snapshot: Snapshot, places: dict[str, str]) -> dict[str, Any]:
    manifest = snapshot.manifest
    values = {
        name: {key: encode(v, name) for key, v in param.kept.items() if not isinstance(v, Tensor)}
        for name, param in manifest.params.items()
    }
    return {
        "format": FORMAT,
        "version": 1,
        "optimizer": manifest.optimizer,
        "step": manifest.step,
        "param_groups": [
            {key: encode(value, key) for key, value in group.items()} for group in manifest.groups
        ],
        "values": {name: kept for name, kept in values.items() if kept},
        "weight_map": places,
    }


def _commit(staging: Path, target: Path, force: bool) -> None:
    """Give what is whole its name; without `force` nothing can be lost, even in a race."""
    if staging.is_dir():
        if not (force and target.exists() and durable.exchange(staging, target)):
            if force and target.exists():
                durable.remove_directory(target)
            staging.rename(target)  # the kernel refuses a directory with something in it
    elif force:
        staging.replace(target)
    else:
        os.link(staging, target)
    durable.sync(target.parent)
