"""Saves that fail: what they froze is free again, also while somebody keeps the error."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import optstream
from checkpoint.runs import after, assert_same_bits, go_on, streamed, weights
from optstream.errors import OffloadError

SHAPES = ((1_000_000,),)


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Path], BaseException]:
    """Return a function that saves where nothing gets durable, and returns the error."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save(optimizer: Any, path: Path) -> BaseException:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            with pytest.raises(OffloadError) as caught:
                optimizer.save(path)
        return caught.value

    return save


def test_a_failed_save_takes_no_third_generation(
    mounted: Callable[..., Path], failed: Callable[[Any, Path], BaseException]
) -> None:
    drive = mounted("ext4", mib=24)
    params, optimizer = streamed(drive / "live", shapes=SHAPES, window="1MiB")
    with optimizer:
        go_on(params, optimizer, range(2))
        error = failed(optimizer, drive / "checkpoint")
        go_on(params, optimizer, [2])
        optimizer.save(drive / "checkpoint")
        assert "cannot" in str(error)
        go_on(params, optimizer, [3])
    assert_same_bits(weights(params), after(4, shapes=SHAPES))
    optstream.verify(drive / "checkpoint")


def test_a_full_drive_trains_on_when_the_copy_fails(
    mounted: Callable[..., Path], tmp_path: Path, failed: Callable[[Any, Path], BaseException]
) -> None:
    params, optimizer = streamed(mounted("ext4", mib=16) / "live", shapes=SHAPES, window="1MiB")
    with optimizer:
        go_on(params, optimizer, range(2))
        error = failed(optimizer, tmp_path / "checkpoint")
        go_on(params, optimizer, range(2, 4))
        assert "cannot" in str(error)
    assert_same_bits(weights(params), after(4, shapes=SHAPES))


def test_no_thread_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        go_on(params, optimizer, range(2))
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                optimizer.save(tmp_path / "checkpoint")
        optimizer.save(tmp_path / "checkpoint")
    optstream.verify(tmp_path / "checkpoint")
