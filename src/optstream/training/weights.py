"""A model's weights as one safetensors file and back; tied ones are in it once."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from optstream import durable
from optstream.errors import CheckpointError

_PIECE_BYTES = 8 * 2**20


def save_weights(module: torch.nn.Module, path: Path) -> str:
    """Write the weights and bring them to the drive; return the file's xxh3.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        save_file(_tensors(module), path, metadata={"format": "pt"})
        path.chmod(0o600)
        durable.sync(path)
    except (OSError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(None, str(error))
        raise durable.failed("write", path, cause) from error
    return file_digest(path)


@torch.no_grad()
def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Copy the weights of a file into a module, one tensor after the other.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape or dtype; nothing was
            changed.
    """
    tensors = _tensors(module)
    try:
        with safe_open(path, framework="pt") as file:
            _check(module, tensors, file, path)
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def file_digest(path: Path) -> str:
    """Return the xxh3 of a file's bytes, read in pieces."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def weights_digest(module: torch.nn.Module) -> str:
    """Return the xxh3 of all weights in memory: ranks whose weights are equal have the same."""
    digest = xxhash.xxh3_64()
    for tensor in _tensors(module).values():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each tied one under its first name."""
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return {name: module.state_dict()[name] for name in first.values()}


def _check(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], file: safe_open, path: Path
) -> None:
    names = set(file.keys())  # type: ignore[no-untyped-call]
    faults = [f"no {name!r}" for name in tensors if name not in names]
    faults += [f"the unknown {name!r}" for name in sorted(names - set(tensors))]
    for name in names & set(tensors):
        given = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if given.shape != tensors[name].shape or given.dtype != tensors[name].dtype:
            wanted = f"{tuple(tensors[name].shape)} {tensors[name].dtype}"
            faults.append(f"{name!r} as {tuple(given.shape)} {given.dtype}, not {wanted}")
    if faults:
        more = f" and {len(faults) - 1} more differences" if len(faults) > 1 else ""
        raise CheckpointError(
            f"{path} has {faults[0]}{more}; it was saved from another model than this "
            f"{type(module).__name__}"
        )
