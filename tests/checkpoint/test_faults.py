"""Drives that fail, are full or far away; loads that end half-way."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
from optstream.checkpoint import directory as directories
from optstream.checkpoint import placing
from optstream.errors import StoreError

Failing = Callable[..., None]

ON_DRIVE = pytest.mark.parametrize("store", ["direct", "mapped"])


def test_a_put_that_fails_half_way_poisons_until_a_load(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = streamed(tmp_path / "a")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        given = optimizer.state_dict()
        failing("pwritev", tmp_path, after=3)
        with pytest.raises(OffloadError, match="cannot write"):
            optimizer.load_state_dict(given)
        monkeypatch.undo()
        for call in (
            lambda: go_on(params, optimizer, [2]),
            lambda: optimizer.save(tmp_path / "other"),
            optimizer.state_dict,
        ):
            with pytest.raises(OffloadError, match="loading the state_dict failed half-way; load"):
                call()
        optimizer.load_state_dict(given)
        go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3))
    assert not (tmp_path / "other").exists()


def test_a_load_that_fails_half_way_and_a_checkpoint_as_the_way_out(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = streamed(tmp_path / "a")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
    other_params, other = streamed(tmp_path / "b", window="100KiB")
    set_weights(other_params, weights(params))
    with other:
        failing("pwritev", tmp_path, after=2)
        with pytest.raises(OffloadError, match="cannot write"):
            other.load(tmp_path / "checkpoint")
        with pytest.raises(OffloadError, match="failed half-way"):
            go_on(other_params, other, [2])
        monkeypatch.undo()
        other.load(tmp_path / "checkpoint")
        go_on(other_params, other, [2])
    assert_same_bits(weights(other_params), after(3))


def test_after_a_step_that_failed_a_load_starts_anew(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = streamed(tmp_path / "a")
    with optimizer:
        go_on(params, optimizer, range(2))
        kept = weights(params)
        optimizer.save(tmp_path / "checkpoint")
        given = optimizer.state_dict()
        for load in (
            lambda: optimizer.load(tmp_path / "checkpoint"),
            lambda: optimizer.load_state_dict(given),
        ):
            go_on(params, optimizer, [7])
            failing("preadv", tmp_path)
            with pytest.raises(OffloadError, match="call step"):
                go_on(params, optimizer, [8, 9])
            monkeypatch.undo()
            assert optimizer._state.num_updated > 0
            set_weights(params, kept)
            load()
        go_on(params, optimizer, range(2, 5))
    assert_same_bits(weights(params), after(5))


def step_and_drain(params: Any, optimizer: Any, step: int) -> None:
    go_on(params, optimizer, [step])
    optimizer._state.stream.drain()


def test_dirty_slots_are_saved_to_another_drive(
    tmp_path: Path, small_drive: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive takes no writes any more; what is only in memory is in the checkpoint, too."""
    params, optimizer = streamed(tmp_path / "a", window="200KiB")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer._state.stream.drain()
        failing("pwritev", tmp_path, after=1)
        with pytest.raises(OffloadError, match="cannot write"):
            step_and_drain(params, optimizer, 2)
        with pytest.raises(OffloadError):
            optimizer.save(tmp_path / "here")
        optimizer.save(small_drive / "there")
        at_save = weights(params)
        monkeypatch.undo()
        go_on(params, optimizer, [3])  # and when the drive is back, training goes on
    assert_same_bits(weights(params), after(4))
    assert not (tmp_path / "here").exists()
    optstream.verify(small_drive / "there")
    params, optimizer = streamed(tmp_path / "b", window="200KiB")
    with optimizer:
        set_weights(params, at_save)
        optimizer.load(small_drive / "there")
        go_on(params, optimizer, [3])
    assert_same_bits(weights(params), after(4))


@pytest.mark.parametrize("ram", [0, "50%"])
def test_no_fresh_files_for_the_writes_after_a_save(
    ram: Any, tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their headers cannot be written; what was updated stays in its slots."""
    params, optimizer = streamed(tmp_path / "a", ram=ram)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        failing("pwritev", tmp_path)
        with pytest.raises(OffloadError, match=r"call step|applied in full") as caught:
            go_on(params, optimizer, [2])
        monkeypatch.undo()
        go_on(params, optimizer, [3] if "in full" in str(caught.value) else [2, 3])
        optimizer.save(tmp_path / "checkpoint")
    assert_same_bits(weights(params), after(4))
    optstream.verify(tmp_path / "checkpoint")


@ON_DRIVE
def test_no_space_for_a_second_generation(
    store: str, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    drive = mounted("ext4", mib=16)
    shapes = ((1_000_000,),)
    params, optimizer = streamed(drive / "live", shapes=shapes, store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        for call in (lambda: optimizer.save(drive / "checkpoint"), optimizer.state_dict):
            with pytest.raises(
                OffloadError,
                match=r"second generation of the state needs 8\.1 MiB, .* has \d\.\d MiB free;",
            ):
                call()
        assert sorted(path.name for path in drive.iterdir()) == ["live", "lost+found"]
        go_on(params, optimizer, [2])
        go_on(params, optimizer, [3])
    assert_same_bits(weights(params), after(4, shapes=shapes))


@ON_DRIVE
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_drive_is_saved_to_another_one(
    store: str,
    wait: bool,
    mounted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies that are made before the next step need no second generation."""
    real: Any = placing._copy
    delays = iter([0.2])

    def copy(*args: Any) -> None:
        time.sleep(next(delays, 0))
        real(*args)

    monkeypatch.setattr(placing, "_copy", copy)
    drive = mounted("ext4", mib=16)
    shapes = ((1_000_000,),)
    params, optimizer = streamed(drive / "live", shapes=shapes, store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        saving = optimizer.save(tmp_path / "checkpoint", wait=wait)
        assert saving.done
        go_on(params, optimizer, [2])
        go_on(params, optimizer, [3])
    assert_same_bits(weights(params), after(4, shapes=shapes))
    optstream.verify(tmp_path / "checkpoint")
    params, optimizer = streamed(tmp_path / "live", shapes=shapes)
    with optimizer:
        set_weights(params, after(2, shapes=shapes))
        optimizer.load(tmp_path / "checkpoint")
        go_on(params, optimizer, [2, 3])
    assert_same_bits(weights(params), after(4, shapes=shapes))


def test_no_space_for_copies(mounted: Callable[..., Path], tmp_path: Path) -> None:
    drive = mounted("ext4", mib=16)
    shapes = ((3_000_000,),)
    params, optimizer = streamed(tmp_path / "live", shapes=shapes)
    with optimizer:
        go_on(params, optimizer, range(2))
        with pytest.raises(OffloadError, match=r"needs copies of 24\.\d MiB, there are"):
            optimizer.save(drive / "checkpoint")
        assert not (drive / "checkpoint.tmp").exists()
        go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3, shapes=shapes))


def test_a_copy_that_runs_out_of_space_is_an_error_of_wait(
    tmp_path: Path, small_drive: Path
) -> None:
    """Space that somebody else took meanwhile; the older checkpoint stays."""
    params, optimizer = streamed(tmp_path / "live", shapes=((1_000_000,),))
    with optimizer:
        go_on(params, optimizer, range(1))
        optimizer.save(small_drive / "checkpoint")
        go_on(params, optimizer, [1])
        free = os.statvfs(small_drive)
        check = directories.check_space
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("optstream.streamed.saving.check_space", lambda *_: check(small_drive, 0))
            with open(small_drive / "other", "wb") as other:
                os.posix_fallocate(other.fileno(), 0, (free.f_bavail - 500) * free.f_frsize)
            saving = optimizer.save(small_drive / "checkpoint", wait=False)
            with pytest.raises(OffloadError, match=r"cannot copy .* to .*: No space left"):
                saving.wait()
        assert sorted(path.name for path in small_drive.iterdir()) == [
            "checkpoint",
            "lost+found",
            "other",
        ]
        (small_drive / "other").unlink()
        go_on(params, optimizer, [2])
        optimizer.save(small_drive / "checkpoint")
    optstream.verify(small_drive / "checkpoint")


@ON_DRIVE
def test_copies_are_made_while_training_goes_on(
    store: str, tmp_path: Path, small_drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is held back until three more steps are done; it is of the moment of the save."""
    go = threading.Event()
    real: Any = placing._copy

    def copy(*args: Any) -> None:
        assert go.wait(30)
        real(*args)

    monkeypatch.setattr(placing, "_copy", copy)
    params, optimizer = streamed(tmp_path / "a", store=store)
    with optimizer:
        go_on(params, optimizer, range(2))
        saved, expected = weights(params), copied(optimizer.state_dict())
        saving = optimizer.save(small_drive / "checkpoint", wait=False)
        go_on(params, optimizer, range(2, 5))
        assert not saving.done
        assert not (small_drive / "checkpoint").exists()
        threading.Timer(0.2, go.set).start()
        optimizer.save(small_drive / "next")  # waits for the first
        assert saving.done
        saving.wait()
    assert_same_bits(weights(params), after(5))
    params, optimizer = streamed(tmp_path / "b", store=store)
    with optimizer:
        set_weights(params, saved)
        optimizer.load(small_drive / "checkpoint")
        assert_same_state(copied(optimizer.state_dict()), expected)
        go_on(params, optimizer, range(2, 5))
    assert_same_bits(weights(params), after(5))


def test_close_waits_for_a_copy_and_tells_its_error(
    tmp_path: Path, small_drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = streamed(tmp_path / "a")
    go_on(params, optimizer, range(2))
    optimizer.save(small_drive / "checkpoint", wait=False)
    optimizer.close()
    optstream.verify(small_drive / "checkpoint")

    def copy(*args: Any) -> None:
        raise StoreError(5, "the other drive is gone")

    monkeypatch.setattr(placing, "_copy", copy)
    params, optimizer = streamed(tmp_path / "a")
    go_on(params, optimizer, range(2))
    optimizer.save(small_drive / "checkpoint", wait=False)
    with pytest.raises(OffloadError, match="the other drive is gone"):
        optimizer.close()
    optimizer.close()
    gc.collect()
    optstream.verify(small_drive / "checkpoint")
    assert not (tmp_path / "a").exists()


@ON_DRIVE
def test_some_directories_on_another_filesystem(
    store: str, tmp_path: Path, small_drive: Path
) -> None:
    """Windows that are here are linked, the others copied; and back by copies."""
    places = [tmp_path / "a", small_drive / "b"]
    params, optimizer = streamed(places, store=store)  # type: ignore[arg-type]
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "one")
        links = [file.stat().st_nlink for file in sorted((tmp_path / "one").glob("rank*/*"))]
        devices = {file.stat().st_dev for file in (tmp_path / "one").glob("rank*/*")}
        assert devices == {tmp_path.stat().st_dev}
        assert set(links) == {1}
        go_on(params, optimizer, [2])
    resumed, optimizer = streamed(places, seed=1, store=store)  # type: ignore[arg-type]
    with optimizer:
        set_weights(resumed, after(2))
        optimizer.load(tmp_path / "one")
        go_on(resumed, optimizer, [2])
    assert_same_bits(weights(resumed), weights(params))
    assert_same_bits(weights(resumed), after(3))
