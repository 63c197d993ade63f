"""What a run leaves in memory and on the drive, and what it tells."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values

from mcore.checkpoints import BY_RANK, sharded_state_dict
from mcore.gpt import ADAM, MUON, MUON_DEALT, Recipe, Training, varied
from mcore.streaming import assert_same_weights, directory, streamed
from optstream.memory import read_memory
from optstream.store.claim import Claim
from optstream.units import format_bytes

LARGE = {
    "hidden_size": 384,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 8,
    "num_query_groups": 4,
}
LARGER = {**LARGE, "hidden_size": 512, "ffn_hidden_size": 4096}
STEPS = 4


class _Peak:
    """The most anonymous memory of this process while it is entered."""

    def __enter__(self) -> _Peak:
        self.peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, read_memory().anon_bytes)


def _grown_bytes(training: Training) -> int:
    """Return what a step needs above what there was before it."""
    training.gradients()
    before_bytes = read_memory().anon_bytes
    with _Peak() as peak:
        training.optimizer.step()
    return peak.peak_bytes - before_bytes


def anonymous_memory() -> None:
    """No step needs more than the plans say, which is less than all float32 gradients."""
    recipe = varied(ADAM, model=LARGER, ddp={"grad_reduce_in_fp32": False})
    with directory() as path, streamed(recipe, path, window_bytes=2**20) as (training, handle):
        plans = [child.streamed.plan for child in handle.children]
        bound_bytes = sum(plan.peak_host_bytes for plan in plans)
        gradient_bytes = 4 * sum(spec.numel for plan in plans for spec in plan.params)
        assert gradient_bytes > bound_bytes, (gradient_bytes, bound_bytes)
        grown = [_grown_bytes(training) for _ in range(STEPS)]
    assert max(grown) < bound_bytes, ([format_bytes(g) for g in grown], format_bytes(bound_bytes))
    assert _grown_bytes(Training(recipe)) > bound_bytes


def nothing_in_memory() -> None:
    """Between steps nothing of float32 is left but DDP's gradients and a window's scratch."""
    for recipe in (ADAM, MUON_DEALT):
        earlier = _float32_tensors()
        with directory() as path, streamed(recipe, path) as (training, handle):
            training.steps(2)
            plans = [child.streamed.plan for child in handle.children]
            scratch_bytes = sum(plan.gradient_bytes + plan.scratch_bytes for plan in plans)
            state_bytes = sum(plan.state_bytes for plan in plans)
            left_bytes = _bytes_beside(earlier, training)
            assert left_bytes <= scratch_bytes + SMALL_BYTES < state_bytes / 4, left_bytes
        earlier = _float32_tensors()
        plain = Training(recipe)
        plain.steps(2)
        assert _bytes_beside(earlier, plain) >= state_bytes


SMALL_BYTES = 2**15
"""Of what a model and its batches have in float32 themselves."""


def _float32_tensors() -> list[torch.Tensor]:
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [t for t in gc.get_objects() if type(t) in kinds and t.dtype == torch.float32]


def _bytes_beside(earlier: list[torch.Tensor], training: Training) -> int:
    """Return the bytes of float32 tensors that came since, but for gradients of a model."""
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in _float32_tensors()}
    known = set(map(_storage, earlier))
    for chunk in training.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            known.add(_storage(buffer.grad_data))
    return sum(size for storage, size in sizes.items() if storage not in known)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(state_dict: Any) -> list[torch.Tensor]:
    """Return what a sharded state_dict holds."""
    tensors = []
    for entry in nested_values(state_dict):
        data = getattr(entry, "data", entry)
        if isinstance(data, torch.Tensor):
            tensors.append(data)
    return tensors


def saves_from_files() -> None:
    """A state_dict to save, and one to load into, hold tensors that are in files, not in memory."""
    for recipe in (ADAM, MUON_DEALT):
        with directory() as path, streamed(varied(recipe, model=LARGE), path) as (training, _):
            training.step()
            for is_loading in (False, True):
                before_bytes = read_memory().anon_bytes
                shown = sharded_state_dict(training, BY_RANK, is_loading)["optimizer"]
                tensors = _tensors(shown)
                num_bytes = sum(tensor.nbytes for tensor in tensors)
                for tensor in tensors:
                    tensor.sum()  # reads all of it, or writes a page where nothing was
                grown_bytes = read_memory().anon_bytes - before_bytes
                assert num_bytes > 40 * 2**20, num_bytes
                assert grown_bytes < num_bytes / 4, (grown_bytes, num_bytes, is_loading)
                del shown, tensors


def no_float32_gradients() -> None:
    """Gradients that DDP reduces in bfloat16 are in float32 in no more than one window."""
    for recipe in (ADAM, MUON_DEALT):
        recipe = varied(recipe, ddp={"grad_reduce_in_fp32": False})
        with directory() as path, streamed(recipe, path) as (training, handle):
            training.gradients()
            assert not training.optimizer.prepare_grads()
            held = [
                one
                for child in handle.children
                for group in child._held
                for one in group
                if one.has_master
            ]
            assert held
            assert all(one.tensor.grad is None for one in held)
            assert all(one.reduced().dtype.itemsize == 2 for one in held)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class _Told(logging.Handler):
    """Keeps what optstream logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> _Told:
        logging.getLogger("optstream").addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger("optstream").removeHandler(self)


def _train(recipe: Recipe, path: Path, streams: bool) -> None:
    """Train on this rank, and hold what it tells against what it does."""
    if not streams:
        Training(recipe).steps(STEPS)
        return
    flags = ("--stream-optimizer-state-metrics-dir", str(path / "metrics"))
    with (
        _Told() as told,
        streamed(recipe, path / "state", *flags, role="actor") as (
            training,
            handle,
        ),
    ):
        training.steps(STEPS)
        own = path / "state" / "actor" / f"rank{dist.get_rank():05d}"
        assert own.is_dir()
        assert not [file for file in own.rglob("*") if file.is_file()], "files have no names"
        kinds = {type(child._inner).__name__ for child in handle.children}
    lines = [record.getMessage() for record in told.records if record.levelno == logging.INFO]
    for kind in kinds:
        for step in range(1, STEPS + 1):
            start = f"{kind} on rank {dist.get_rank()}, step {step}: "
            assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    others = [record.getMessage() for record in told.records if record.levelno > logging.INFO]
    assert not [text for text in others if "process_group" in text], others


def _check_reports(path: Path, optimizers: set[str]) -> None:
    """Every rank has written lines of steps that moved bytes, for the optimizers that ran."""
    seen: set[str] = set()
    for rank in range(dist.get_world_size()):
        files = sorted((path / "metrics").glob(f"actor-rank{rank:05d}-*.jsonl"))
        assert files, f"rank {rank} streamed nothing"
        for file in files:
            lines = _lines(file)
            assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), file
            assert all(line["rank"] == rank for line in lines), file
            assert sum(line["written_bytes"] for line in lines) > 0, file
            assert all(line["num_windows"] > 0 for line in lines), file
            seen.add(file.stem.rpartition("-")[2])
    assert seen == optimizers


def every_rank_streams() -> None:
    """Each rank's own lines say so, worded for the optimizers that ran there."""
    for recipe, optimizers in ((MUON, {"TensorParallelMuon", "AdamW"}), (ADAM, {"AdamW"})):
        with directory() as path:
            _train(recipe, path, streams=True)
            dist.barrier()
            _check_reports(path, optimizers)
            dist.barrier()


def a_rank_that_does_not_is_found() -> None:
    """Training goes well on all ranks, and on one of them nothing is streamed."""
    with directory() as path:
        _train(MUON, path, streams=dist.get_rank() != 2)
        dist.barrier()
        with pytest.raises(AssertionError, match="rank 2 streamed nothing"):
            _check_reports(path, {"TensorParallelMuon", "AdamW"})
        dist.barrier()


def _dead(directory: Path) -> Path:
    """Leave what a run leaves that was killed where files must have names."""
    claim = _living(directory)
    os.close(claim.lock_fd)
    return claim.path


def _living(directory: Path) -> Claim:
    directory.mkdir(parents=True)
    claim = Claim(directory)
    claim.file(0).write_bytes(b"state")
    return claim


def roles() -> None:
    """An actor and a critic of one job do not see each other's state, nor that of other jobs.

    What dead runs of the same role have left is removed, whatever ranks and optimizers they had.
    """
    rank = f"rank{dist.get_rank():05d}"
    with directory() as path:
        if dist.get_rank() == 0:
            living = _living(path / "critic" / "rank00000" / "7-SGD")
            dead = _dead(path / "critic" / "rank00009" / "0-AdamW")
            of_others = _dead(path / "actor" / "rank00000" / "0-AdamW")
        dist.barrier()
        expected = [Training(varied(MUON_DEALT, seed=seed)) for seed in (5, 6)]
        for plain in expected:
            plain.steps(1)
        with (
            streamed(varied(MUON_DEALT, seed=5), path, role="critic") as (critic, _),
            streamed(varied(MUON_DEALT, seed=6), path, role="critic") as (other_job, _),
        ):
            dist.barrier()
            if dist.get_rank() == 0:
                assert living.file(0).exists()
                assert of_others.exists()
                assert not dead.exists()
            with streamed(MUON_DEALT, path, role="actor") as (actor, _):
                for training in (critic, other_job, actor):
                    training.steps(1)
                assert_same_weights(critic, expected[0])
                assert_same_weights(other_job, expected[1])
                assert sorted(each.name for each in path.iterdir()) == ["actor", "critic"]
                assert (path / "actor" / rank).is_dir()
                assert (path / "critic" / rank).is_dir()
