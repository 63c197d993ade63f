"""setup(): stream every optimizer of a chain, between making it and loading a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optstream.errors import ConfigError
from optstream.integrations.megatron.arguments import state_directory, storage
from optstream.integrations.megatron.child import StreamedChild
from optstream.integrations.megatron.held import children
from optstream.integrations.megatron.requirements import validate
from optstream.report import StepReport, process_rank
from optstream.store.claim import purge_stale

log = logging.getLogger("optstream")


class Streamed:
    """The optimizers of one rank whose state is on its drive.

    Attributes:
        children: one for each torch optimizer in the chain, in its order.
    """

    def __init__(self, children: Sequence[StreamedChild]) -> None:
        self.children = tuple(children)

    @property
    def reports(self) -> dict[str, StepReport | None]:
        """What the last step did, by optimizer."""
        return {child.label: child.streamed.report for child in self.children}

    def save(self, path: str | Path) -> None:
        """Link this rank's state into a checkpoint of optstream's own; call it on all ranks.

        No state bytes move on the filesystem of the state; Megatron's own checkpoints hold the same
        and can be loaded at another parallelism, this one cannot.
        """
        for child in self.children:
            child.save(_of_rank(path) / child.label)
        _barrier()

    def load(self, path: str | Path) -> None:
        """Take what `save` wrote, at the same parallelism; load the model's weights as well.

        Raises:
            CheckpointError: it does not fit, and names what.
        """
        for child in self.children:
            child.load(_of_rank(path) / child.label)
        _barrier()

    def close(self) -> None:
        """Give back files and buffers; the optimizers cannot step any more."""
        for child in self.children:
            child.streamed.close()


def setup(args: Any, optimizer: Any, role: str = "") -> Streamed | None:
    """Move masters and state of all of Megatron's optimizers to the drive.

    Call it after `get_megatron_optimizer` and before a checkpoint is loaded, on every rank. Nothing
    else in the training loop changes.

    Args:
        args: Megatron's arguments, with those of `add_arguments`.
        optimizer: what `get_megatron_optimizer` returned.
        role: of this model where a job trains several ("actor", "critic"): part of the directory.

    Returns:
        None without --stream-optimizer-state-to-disk.

    Raises:
        ConfigError, UnsupportedOptimizerError, StoreError: what cannot be streamed and why; the
            optimizer must not be used then.
    """
    validate(args)
    if not args.stream_optimizer_state_to_disk:
        return None
    if hasattr(optimizer, "optstream"):
        raise ConfigError("setup() was called for this optimizer already; once is enough")
    rank = process_rank()
    directory = state_directory(args, role, rank)
    _purge_stale(directory.parent)
    metrics = getattr(args, "stream_optimizer_state_metrics_dir", None)
    names = _names(optimizer)
    with contextlib.ExitStack() as undo:
        streamed: list[StreamedChild] = []
        for index, child in enumerate(children(optimizer)):
            label = f"{index}-{type(child.optimizer).__name__}"
            streamed.append(
                StreamedChild(
                    child,
                    label,
                    directory / label,
                    storage(args),
                    names,
                    _metrics_file(metrics, role, rank, label),
                )
            )
            undo.callback(streamed[-1].streamed.close)
        if not streamed:
            log.info("rank %d has no parameters to train and streams nothing", rank)
        undo.pop_all()
    optimizer.optstream = Streamed(streamed)
    return optimizer.optstream  # type: ignore[no-any-return]


def _purge_stale(of_role: Path) -> None:
    """Remove what dead runs have left, also on more ranks, or with another optimizer."""
    for directory in of_role.glob("rank*/*"):
        purge_stale(directory)


def _names(optimizer: Any) -> dict[int, str]:
    """Return the names of model parameters by `id`."""
    chunks = {id(chunk): chunk for chunk in _chunks(optimizer)}
    prefixes = [f"chunk{i}." for i in range(len(chunks))] if len(chunks) > 1 else [""]
    return {
        id(param): prefix + name.replace("module.", "")
        for prefix, chunk in zip(prefixes, chunks.values(), strict=False)
        for name, param in chunk.named_parameters()
    }


def _chunks(optimizer: Any) -> Iterator[Any]:
    yield from getattr(optimizer, "model_chunks", [])
    for child in getattr(optimizer, "chained_optimizers", []):
        yield from _chunks(child)


def _metrics_file(directory: str | None, role: str, rank: int, label: str) -> Path | None:
    if directory is None:
        return None
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "-".join(part for part in (role, f"rank{rank:05d}", f"{label}.jsonl") if part)


def _of_rank(path: str | Path) -> Path:
    return Path(path) / f"rank{process_rank():05d}"


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
