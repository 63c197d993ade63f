"""What a run leaves in memory and on the drive, and what it tells."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values

from mcore.checkpoints import BY_RANK, sharded_state_dict
from mcore.gpt import ADAM, MUON, MUON_DEALT, Recipe, Training, varied
from mcore.streaming import directory, streamed
from optstream.memory import read_memory
from optstream.units import format_bytes

LARGE = {
    "hidden_size": 384,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 8,
    "num_query_groups": 4,
}
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
    """No step needs more than the plans say; a first one without optstream makes all the state."""
    recipe = varied(ADAM, model=LARGE)
    with directory() as path, streamed(recipe, path, window_bytes=2**20) as (training, handle):
        plans = [child.streamed.plan for child in handle.children]
        state_bytes = sum(plan.state_bytes for plan in plans)
        bound_bytes = sum(plan.peak_host_bytes for plan in plans)
        assert state_bytes > 1.5 * bound_bytes, (state_bytes, bound_bytes)
        grown = [_grown_bytes(training) for _ in range(STEPS)]
    assert max(grown) < bound_bytes, ([format_bytes(g) for g in grown], format_bytes(bound_bytes))
    assert _grown_bytes(Training(recipe)) > bound_bytes


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


def _stream_and_report(recipe: Recipe, optimizers: set[str]) -> None:
    with directory() as path:
        flags = ("--stream-optimizer-state-metrics-dir", str(path / "metrics"))
        with streamed(recipe, path / "state", *flags, role="actor") as (training, handle):
            training.steps(STEPS)
            assert {label.partition("-")[2] for label in handle.reports} <= optimizers
            own = path / "state" / "actor" / f"rank{dist.get_rank():05d}"
            assert own.is_dir()
            assert not [file for file in own.rglob("*") if file.is_file()], "files have no names"
        dist.barrier()
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
        dist.barrier()


def every_rank_streams() -> None:
    """Each rank's own lines say so, worded for the optimizers that ran there."""
    _stream_and_report(MUON, {"TensorParallelMuon", "AdamW"})
    _stream_and_report(ADAM, {"AdamW"})


def roles() -> None:
    """An actor and a critic of one job do not see each other's state."""
    with (
        directory() as path,
        streamed(MUON_DEALT, path, role="actor") as (actor, _),
        streamed(varied(MUON_DEALT, seed=5), path, role="critic") as (critic, _),
    ):
        actor.steps(1)
        critic.steps(1)
        rank = f"rank{dist.get_rank():05d}"
        assert sorted(each.name for each in path.iterdir()) == ["actor", "critic"]
        assert (path / "actor" / rank).is_dir()
        assert (path / "critic" / rank).is_dir()
