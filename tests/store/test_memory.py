"""What is particular to windows in memory."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable

import pytest

from optstream.errors import ClosedError, OutOfSpaceError
from optstream.memory import read_memory
from optstream.store import WindowFile
from optstream.store.base import Store

Windows = Callable[..., list[WindowFile]]
Opened = Callable[..., Store]


def test_windows_are_anonymous_memory_once_touched(opened: Opened, windows: Windows) -> None:
    store = opened("memory", "")
    before = read_memory()
    store.reserve(windows(4096, 4096))
    assert read_memory().anon_bytes - before.anon_bytes < 2**20
    store.view(1)[:] = bytes(2**24)
    after = read_memory()
    assert after.anon_bytes - before.anon_bytes > 15 * 2**20
    assert after.shmem_bytes == before.shmem_bytes


def test_a_view_outlives_the_store(opened: Opened, windows: Windows) -> None:
    store = opened("memory", "")
    store.reserve(windows(1))
    view = store.view(0)
    store.close()
    view[:] = bytes([5]) * 4096
    assert view[4095] == 5


def test_memory_that_cannot_be_had(
    opened: Opened, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened("memory", "")
    monkeypatch.setattr("optstream.store.memory.read_available_bytes", lambda: 10 * 2**20)
    with pytest.raises(
        OutOfSpaceError,
        match=r'needs 12\.0 MiB of memory, 10\.0 MiB is left .* store="direct"',
    ) as caught:
        store.reserve(windows(1024, 2048))
    assert caught.value.errno == errno.ENOMEM
    store.reserve(windows(1024))

    def refused(*args: int, **kwargs: int) -> None:
        raise OSError(errno.ENOMEM, "")

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(OutOfSpaceError, match=r"needs 4\.0 KiB of memory"):
        store.reserve(windows(1))


def test_a_memory_limit_of_the_process(
    opened: Opened, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, hard))
    try:
        with pytest.raises(OutOfSpaceError, match=r"needs 8\.0 GiB of memory"):
            opened("memory", "").reserve(windows(2**20, 2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_a_forked_child_has_none_of_it(opened: Opened, windows: Windows) -> None:
    """Else the parent would copy every page that it updates while the child lives."""
    before = read_memory().anon_bytes
    store = opened("memory", "")
    store.reserve(windows(4096))
    store.view(0)[:] = bytes(2**24)
    child = os.fork()
    if child == 0:
        inherited = read_memory().anon_bytes - before
        try:
            store.view(0)
        except ClosedError:
            os._exit(0 if inherited < 8 * 2**20 else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
