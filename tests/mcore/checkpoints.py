"""Megatron's checkpoints with and without optstream are the same; optstream's own work as well."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from mcore.fused_adam import fused_adam
from mcore.gpt import (
    ADAM,
    ADAM_PLAIN,
    EXPERTS,
    MUON,
    MUON_DEALT,
    MUON_PLAIN,
    Recipe,
    Training,
    varied,
)
from mcore.streaming import assert_nothing_left, assert_same_weights, directory, streamed

FULLY, BY_RANK = "fully_reshardable", "dp_reshardable"
BEFORE, AFTER = 3, 2


def _metadata(sharding: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": sharding,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded_state_dict(training: Training, sharding: str, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata(sharding)
    model = training.ddp.module.module.sharded_state_dict(metadata=metadata)
    optimizer = training.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=metadata
    )
    return {"model": model, "optimizer": optimizer}


def save(training: Training, path: Path, sharding: str) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded_state_dict(training, sharding, is_loading=False), str(path))
    dist.barrier()


def load(training: Training, path: Path, sharding: str) -> None:
    loaded = dist_checkpointing.load(
        sharded_state_dict(training, sharding, is_loading=True), str(path)
    )
    training.ddp.module.module.load_state_dict(loaded["model"])
    training.optimizer.load_state_dict(loaded["optimizer"])
    dist.barrier()


def _other(recipe: Recipe) -> Recipe:
    """Return the recipe of a model with other weights."""
    return varied(recipe, seed=999)


def interchangeable(recipe: Recipe, sharding: str, plain_loads: bool = True, *flags: str) -> None:
    """Saved with or without optstream, loaded with or without: the bits of a run never stopped."""
    with directory() as path:
        plain = Training(recipe)
        plain.steps(BEFORE)
        save(plain, path / "plain", sharding)
        expected = plain.steps(AFTER)
        with streamed(recipe, path / "state", *flags) as (training, handle):
            training.steps(BEFORE)
            save(training, path / "streamed", sharding)
            assert_nothing_left(handle)
            assert training.steps(AFTER) == expected
            assert_same_weights(training, plain)
        assert _files(path / "streamed") == _files(path / "plain"), "files beside Megatron's own"
        for source in ("plain", "streamed"):
            with streamed(_other(recipe), path / "state", *flags) as (training, handle):
                load(training, path / source, sharding)
                assert_nothing_left(handle)
                assert training.steps(AFTER) == expected, source
                assert_same_weights(training, plain)
        if plain_loads:
            training = Training(_other(recipe))
            load(training, path / "streamed", sharding)
            assert training.steps(AFTER) == expected
            assert_same_weights(training, plain)


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def float16_muon() -> None:
    interchangeable(MUON_PLAIN, FULLY)


def float16_adam() -> None:
    interchangeable(ADAM_PLAIN, FULLY)


def muon_dealt() -> None:
    interchangeable(MUON_DEALT, FULLY)


def muon_dealt_experts() -> None:
    interchangeable(varied(MUON_DEALT, model=EXPERTS), FULLY)


def muon_fused() -> None:
    with fused_adam():
        interchangeable(MUON, FULLY)


def muon_fused_by_rank() -> None:
    with fused_adam():
        interchangeable(MUON, BY_RANK)


def adam_fused() -> None:
    with fused_adam():
        interchangeable(ADAM, FULLY)


def adam_fused_by_rank() -> None:
    with fused_adam():
        interchangeable(ADAM, BY_RANK)


def adam_of_torch() -> None:
    """Megatron itself cannot load what it saves of torch's AdamW; with optstream it is right."""
    interchangeable(ADAM, FULLY, plain_loads=False)


def adam_of_torch_by_rank() -> None:
    interchangeable(ADAM, BY_RANK, plain_loads=False)


def muon_of_torch() -> None:
    interchangeable(MUON, FULLY, plain_loads=False)


def _between_worlds(layout: str, recipe: Recipe) -> Path:
    """Return where one number of ranks, or one layout of them, leaves what another takes."""
    return Path(os.environ["OPTSTREAM_TEST_SHARED"]) / f"{layout}-{recipe.optimizer}"


def save_to_reshard() -> None:
    """Two ranks leave checkpoints: data parallel with moments in a byte, or tensor parallel."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    flags = () if tensor > 1 else ("--stream-optimizer-state-moment-dtype", "int8")
    with fused_adam():
        for recipe in (ADAM, MUON_DEALT):
            with directory() as path, streamed(recipe, path, *flags) as (training, _):
                training.steps(BEFORE)
                save(training, _between_worlds(f"tp{tensor}", recipe), FULLY)


def load_resharded() -> None:
    """On four data-parallel ranks they load as into Megatron itself, and train on alike."""
    with fused_adam():
        for layout, recipe in itertools.product(("tp1", "tp2"), (ADAM, MUON_DEALT)):
            plain = Training(_other(recipe))
            load(plain, _between_worlds(layout, recipe), FULLY)
            expected = plain.steps(AFTER)
            with directory() as path, streamed(_other(recipe), path) as (training, _):
                load(training, _between_worlds(layout, recipe), FULLY)
                assert training.steps(AFTER) == expected
                assert_same_weights(training, plain)


def asynchronous() -> None:
    """A forked process writes while training goes on; it has the values of when it was asked."""
    queue = AsyncCallsQueue()
    with directory() as path, streamed(MUON_DEALT, path / "state") as (training, _):
        training.steps(BEFORE)
        if dist.get_rank() == 0:
            (path / "saved").mkdir()
        dist.barrier()
        state = sharded_state_dict(training, FULLY, is_loading=False)
        queue.schedule_async_request(
            dist_checkpointing.save(
                state, str(path / "saved"), async_sharded_save=True, async_strategy="mcore"
            )
        )
        expected = training.steps(AFTER)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        with streamed(_other(MUON_DEALT), path / "state") as (resumed, _):
            load(resumed, path / "saved", FULLY)
            assert resumed.steps(AFTER) == expected
            assert_same_weights(resumed, training)


def one_after_the_other() -> None:
    """A save touches nothing of an earlier one, and leaves nothing beside them in their root."""
    with directory() as path, streamed(ADAM, path / "state") as (training, handle):
        root = path / "root"
        if dist.get_rank() == 0:
            root.mkdir()
        dist.barrier()
        for number in (1, 2):
            training.steps(1)
            save(training, root / f"iter_{number:07d}", BY_RANK)
            handle.save(root / f"own_{number:07d}")
            written = {file: file.stat() for file in root.rglob("*") if file.is_file()}
            if number == 1:
                first = {file: (stat.st_ino, stat.st_mtime_ns) for file, stat in written.items()}
        assert first == {file: (written[file].st_ino, written[file].st_mtime_ns) for file in first}
        names = ("iter_0000001", "iter_0000002", "own_0000001", "own_0000002")
        assert sorted(entry.name for entry in root.iterdir()) == list(names)
        dist.barrier()


def torch_format() -> None:
    """`state_dict` and `load_state_dict` of the whole chain, as the older format uses them."""
    for recipe in (ADAM_PLAIN, MUON_PLAIN):
        plain = Training(recipe)
        plain.steps(BEFORE)
        saved = copy.deepcopy(plain.optimizer.state_dict())
        weights = plain.weights()
        with directory() as path, streamed(recipe, path / "state") as (training, _):
            training.steps(BEFORE)
            ours = training.optimizer.state_dict()
            _assert_same(saved, ours)
            torch.save(ours, path / "optimizer.pt")
            training.steps(1)  # what was saved is no longer the state
            loaded = torch.load(path / "optimizer.pt", weights_only=False)
            _assert_same(saved, loaded)
        with directory() as path, streamed(_other(recipe), path) as (training, _):
            training.load_weights(weights)
            training.optimizer.load_state_dict(loaded)
            expected = plain.steps(AFTER)
            assert training.steps(AFTER) == expected
            assert_same_weights(training, plain)


def _assert_same(one: Any, other: Any, at: str = "") -> None:
    if torch.is_tensor(one):
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            _assert_same(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            _assert_same(left, right, f"{at}/{index}")
    else:
        assert one == other, at


def own() -> None:
    """`save` links files, `load` takes them back; both with the model's weights beside."""
    for recipe in (ADAM, MUON_DEALT):
        with directory() as path, streamed(recipe, path / "state") as (first, handle):
            first.steps(BEFORE)
            handle.save(path / "saved")
            weights = first.weights()
            expected = first.steps(AFTER)
            with streamed(_other(recipe), path / "state", role="critic") as (second, again):
                second.load_weights(weights)
                again.load(path / "saved")
                assert second.steps(AFTER) == expected
                assert_same_weights(second, first)
