"""Directories and files: names, replaced and deleted checkpoints, neighbours, what is held."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import optstream
from checkpoint.runs import (
    after,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from optstream import OffloadError
from store.conftest import open_files, refuse

__all__ = ["open_files", "refuse"]

OpenFiles = Callable[[Path], list[str]]

ON_DRIVE = pytest.mark.parametrize("store", ["direct", "mapped"])


def resumed(
    path: Path, saved: list[torch.Tensor], steps: range, **options: object
) -> list[torch.Tensor]:
    """Load a checkpoint in a new optimizer and go on; return the weights."""
    params, optimizer = streamed(path.parent / "resumed", seed=1, **options)  # type: ignore[arg-type]
    with optimizer:
        set_weights(params, saved)
        optimizer.load(path)
        go_on(params, optimizer, steps)
    return weights(params)


@ON_DRIVE
def test_two_saves_in_a_row_and_one_after_each_step(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        for number in range(2):
            go_on(params, optimizer, [number])
            optimizer.save(tmp_path / f"a{number}")  # while the last writes drain
            optimizer.save(tmp_path / f"b{number}")
    for number in range(2):
        for name in "ab":
            path = tmp_path / f"{name}{number}"
            optstream.verify(path)
            assert_same_bits(resumed(path, after(number + 1), range(number + 1, 3)), after(3))


@ON_DRIVE
def test_a_save_before_any_step(store: str, tmp_path: Path) -> None:
    _, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        optimizer.save(tmp_path / "checkpoint")
        assert optimizer.state_dict()["state"].keys() == set(range(6))
    optstream.verify(tmp_path / "checkpoint")
    assert_same_bits(resumed(tmp_path / "checkpoint", after(0), range(2)), after(2))


def test_saving_over_an_older_one_leaves_only_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    (tmp_path / "link").symlink_to(path)
    path.mkdir()  # an empty directory may be in the way
    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        for number in range(3):
            go_on(params, optimizer, [number])
            optimizer.save(path)
            assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "link", "live"]
        optimizer.save(tmp_path / "link")  # takes the link's place
        assert not (tmp_path / "link").is_symlink()
    for name in ("checkpoint", "link"):
        assert_same_bits(resumed(tmp_path / name, after(3), range(3, 5)), after(5))


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    (tmp_path / "file").touch()
    shutil.copytree(mine, tmp_path / "checkpoint.tmp")
    shutil.copytree(mine, tmp_path / "checkpoint.replaced")
    with optimizer:
        go_on(params, optimizer, [0])
        for name in ("mine", "file"):
            with pytest.raises(OffloadError, match="is there and is no checkpoint"):
                optimizer.save(tmp_path / name)
        with pytest.raises(OffloadError, match=r"checkpoint\.tmp, where something else is"):
            optimizer.save(tmp_path / "checkpoint")
        shutil.rmtree(tmp_path / "checkpoint.tmp")
        optimizer.save(tmp_path / "checkpoint")
    for name in ("mine", "checkpoint.replaced"):
        assert (tmp_path / name / "thesis.txt").exists()


def test_another_save_to_the_path_is_refused_a_dead_one_is_removed(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live")
    staging = tmp_path / "checkpoint.tmp"
    (staging / "rank00000").mkdir(parents=True)
    (staging / "rank00000" / "window00000.safetensors").touch()
    holder = os.open(staging, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with optimizer:
        go_on(params, optimizer, [0])
        with pytest.raises(OffloadError, match="another process is saving to"):
            optimizer.save(tmp_path / "checkpoint")
        assert staging.exists()
        os.close(holder)
        optimizer.save(tmp_path / "checkpoint")
        assert not staging.exists()
    optstream.verify(tmp_path / "checkpoint")


def test_many_savers_to_one_path(tmp_path: Path) -> None:
    """Each succeeds or is refused; what is there is always one whole checkpoint."""
    path = tmp_path / "checkpoint"
    optimizers = [streamed(tmp_path / f"live{i}", shapes=((90, 130), (7,))) for i in range(3)]
    outcomes: list[str] = []

    def save(optimizer: optstream.StreamedOptimizer) -> None:
        for _ in range(8):
            try:
                optimizer.save(path)
                outcomes.append("saved")
            except OffloadError as error:
                outcomes.append(str(error))

    for number, (params, optimizer) in enumerate(optimizers):
        go_on(params, optimizer, range(number + 1))
    threads = [threading.Thread(target=save, args=[o]) for _, o in optimizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [text for text in outcomes if text != "saved"]
    assert len(outcomes) == 24
    assert all("another process is saving to" in text for text in refused), refused
    assert "saved" in outcomes
    for _, optimizer in optimizers:
        optimizer.close()
    optstream.verify(path)
    assert sorted(p.name for p in tmp_path.glob("checkpoint*")) == ["checkpoint"]


def test_a_killed_replacement_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.replaced")
        assert_same_bits(resumed(tmp_path / "checkpoint", after(2), range(2, 3)), after(3))
        assert "a save was killed while it replaced it" in caplog.text
        optstream.verify(tmp_path / "checkpoint")
        optimizer.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint.replaced").exists()


@ON_DRIVE
@pytest.mark.parametrize("named", [False, True])
def test_checkpoints_deleted_while_training_goes_on(
    store: str, named: bool, tmp_path: Path, refuse: Callable[[int, int], None]
) -> None:
    if named:
        refuse(os.O_TMPFILE, 95)
    params, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "a")
        kept = copied(optimizer.state_dict())
        shutil.rmtree(tmp_path / "a")
        optimizer.save(tmp_path / "b")  # the same files, whose last name is gone
        go_on(params, optimizer, [2])
        shutil.rmtree(tmp_path / "b")
        go_on(params, optimizer, [3])
        optimizer.save(tmp_path / "c")
    resumed_params, other = streamed(tmp_path / "live2", store=store)
    with other:
        set_weights(resumed_params, weights(params))
        other.load(tmp_path / "c")
        shutil.rmtree(tmp_path / "c")  # adopted, not yet read
        other.save(tmp_path / "d")
        go_on(resumed_params, other, [4])
        other.load(tmp_path / "d")
        assert other._reporter.next_step == 5
    assert kept["0/step"] == 2
    optstream.verify(tmp_path / "d")
    assert_same_bits(weights(resumed_params), after(5))
    assert not (tmp_path / "live").exists()


@ON_DRIVE
def test_the_live_directory_is_deleted(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        shutil.rmtree(tmp_path / "live")
        go_on(params, optimizer, [2])
        optimizer.save(tmp_path / "checkpoint")
        go_on(params, optimizer, [3])
    optstream.verify(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(4))


@pytest.mark.parametrize("kind", ["named", "memory"])
def test_stores_without_nameless_files(
    kind: str, tmp_path: Path, refuse: Callable[[int, int], None]
) -> None:
    if kind == "named":
        refuse(os.O_TMPFILE, 95)
    options = {"store": "memory"} if kind == "memory" else {}
    params, optimizer = streamed(tmp_path / "live", **options)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        given = optimizer.state_dict()
        before = copied(given)
        go_on(params, optimizer, range(2, 5))
        assert_same_state(copied(given), before)
        if kind == "named":  # linked, not copied
            files = list((tmp_path / "checkpoint").glob("rank*/*"))
            assert files
            assert all(file.stat().st_nlink == 1 for file in files)
    optstream.verify(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(5))
    again = resumed(tmp_path / "checkpoint", after(2), range(2, 5), **options)
    assert_same_bits(again, after(5))


# -- what is held


def used_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


@ON_DRIVE
def test_space_and_descriptors_are_bounded_and_given_back(
    store: str, small_drive: Path, open_files: OpenFiles
) -> None:
    """At most two generations; checkpoints own theirs; nothing is left after close."""
    empty_bytes = used_bytes(small_drive)
    params, optimizer = streamed(small_drive / "live", shapes=((400_000,),), store=store)
    with optimizer:
        live_bytes = used_bytes(small_drive) - empty_bytes
        live_fds = len(open_files(small_drive))
        for number in range(6):
            go_on(params, optimizer, [number])
            given = optimizer.state_dict()
            go_on(params, optimizer, [number])
            assert given["state"][0]["step"] == 4 * number + 1
            del given
            optimizer.save(small_drive / "checkpoint")
            go_on(params, optimizer, [number])
            shutil.rmtree(small_drive / "checkpoint")
            go_on(params, optimizer, [number])
        gc.collect()
        assert used_bytes(small_drive) - empty_bytes <= 2 * live_bytes + 2**20
        assert len(open_files(small_drive)) <= 2 * live_fds
    assert used_bytes(small_drive) - empty_bytes < 2**20
    assert open_files(small_drive) == []


@ON_DRIVE
def test_tensors_outlive_the_optimizer(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path, store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        given = optimizer.state_dict()
        before = copied(given)
        go_on(params, optimizer, range(2, 5))
    del optimizer
    gc.collect()
    assert_same_state(copied(given), before)
    one = given["state"][0]["exp_avg"]
    del given
    gc.collect()
    assert torch.equal(one, before["0/exp_avg"])


def test_tensors_have_storages_of_their_own_size_and_no_file_changes(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        given = optimizer.state_dict()
        for state in given["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                assert state[key].untyped_storage().nbytes() == state[key].nbytes
                assert state[key].storage_offset() == 0
                state[key].fill_(7.0)
        go_on(params, optimizer, [2])
    optstream.verify(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(3))


def test_many_small_tensors_take_few_mappings(tmp_path: Path) -> None:
    shapes = ((3,),) * 2000
    params, optimizer = streamed(tmp_path, shapes=shapes)
    with optimizer:
        go_on(params, optimizer, [0])
        before = len(Path("/proc/self/maps").read_text().splitlines())
        given = optimizer.state_dict()
        assert len(given["state"]) == 2000
        now = len(Path("/proc/self/maps").read_text().splitlines())
    assert now - before <= 2 * optimizer.plan.num_windows + 8


@ON_DRIVE
def test_a_forked_child_reads_its_tensors_and_harms_nothing(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "live", store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        given = optimizer.state_dict()
        before = copied(given)
        child = os.fork()
        if child == 0:
            try:
                assert_same_state(copied(given), before)
                try:
                    optimizer.save(tmp_path / "child")
                except OffloadError:
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not (tmp_path / "child").exists()
        optimizer.save(tmp_path / "checkpoint")
        go_on(params, optimizer, [2])
        assert_same_state(copied(given), before)
    optstream.verify(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(3))
