"""Fixtures: a failing drive, a directory that must end empty, a guard against hanging."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.drive import FaultyDrive, assert_nothing_left
from optstream.mounts import find_mount

GUARD_S = 120


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Fail a test that hangs: the alarm also ends waits for locks and for other threads."""

    def expire(*args: object) -> None:
        raise TimeoutError(f"still not done after {GUARD_S} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(GUARD_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a drive in which nothing may be left: no file, no descriptor, no thread."""
    mount = find_mount(tmp_path)
    if mount is None or mount.kind in {"tmpfs", "ramfs"}:
        pytest.skip("the temporary directory is in memory; give pytest --basetemp on a drive")
    path = tmp_path / "state"
    yield path
    assert_nothing_left(path)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FaultyDrive:
    faulty = FaultyDrive()
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def call(fd: int, buffers: Any, at: int, name: str = name, real: Any = real) -> int:
            return faulty.call(name, real, fd, buffers, at)

        monkeypatch.setattr(os, name, call)
    return faulty
