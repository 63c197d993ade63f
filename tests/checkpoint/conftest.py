"""Fixtures for checkpoints: mounted filesystems, a drive that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from store.conftest import mounted

__all__ = ["failing", "mounted", "small_drive"]

Fail = Callable[..., None]


@pytest.fixture
def small_drive(mounted: Callable[..., Path]) -> Path:
    """Another filesystem, of 64 MiB."""
    return mounted("ext4")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fail]:
    """Return a function after which a transfer fails (EIO), from its `after`-th call on.

    It fails only on files of the filesystem of `path`.
    """

    def arrange(name: str, path: Path, after: int = 0) -> None:
        real = getattr(os, name)
        device = path.stat().st_dev
        calls = 0

        def transfer(fd: int, buffers: Any, at: int) -> int:
            nonlocal calls
            if os.fstat(fd).st_dev == device:
                calls += 1
                if calls > after:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return int(real(fd, buffers, at))

        monkeypatch.setattr(os, name, transfer)

    yield arrange
    monkeypatch.undo()
