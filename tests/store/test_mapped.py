"""What is particular to windows in the page cache."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.errors import StoreError, WindowReadError, WindowWriteError
from optstream.memory import read_memory
from optstream.store import WindowFile, open_store, pages
from optstream.store.base import Store
from optstream.store.mapped import Mapped

Opened = Callable[..., Store]
Windows = Callable[..., list[WindowFile]]
NUM_PAGES = 4096
NUM_BYTES = NUM_PAGES * 4096


@pytest.fixture
def store(opened: Opened, windows: Windows, drive_path: Path) -> Mapped:
    """One of two windows of 16 MiB, the first of which is updated."""
    store = opened("mapped", drive_path)
    assert isinstance(store, Mapped)
    store.reserve(windows(NUM_PAGES, NUM_PAGES))
    fill(store, 0, 5)
    return store


def fill(store: Mapped, window: int, value: int) -> None:
    store.prepare_write(window)
    store.bring_in(window)
    view, part = store.view(window), bytes([value]) * 2**20
    for offset in range(0, NUM_BYTES, len(part)):
        view[offset : offset + len(part)] = part


def drop_clean_pages(store: Mapped, window: int) -> int:
    """Let the kernel forget what is written; return the bytes it could drop."""
    live = store._held.live[window]
    assert live.view is not None
    # pages that are mapped are not dropped: this is what reclaim does to them
    pages._libc.madvise(pages.address_of(live.view), len(live.view), 4)  # MADV_DONTNEED
    os.posix_fadvise(live.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return pages.count_missing_bytes(live.fd, 4096 + NUM_BYTES)


def test_the_state_is_page_cache(opened: Opened, windows: Windows, drive_path: Path) -> None:
    store = opened("mapped", drive_path)
    before = read_memory()
    store.reserve(windows(NUM_PAGES))
    fill(store, 0, 1)
    after = read_memory()
    assert after.anon_bytes - before.anon_bytes < 8 * 2**20
    assert after.shmem_bytes == before.shmem_bytes
    assert after.file_bytes - before.file_bytes > NUM_BYTES * 0.9


def test_what_is_written_back_can_be_dropped_and_is_read_again(store: Mapped) -> None:
    assert drop_clean_pages(store, 0) <= 4096  # all dirty, but for the header
    assert store.write_back(0) == NUM_BYTES
    assert drop_clean_pages(store, 0) >= NUM_BYTES
    store.prepare_write(0)
    assert store.bring_in(0) >= NUM_BYTES
    assert store.bring_in(0) == 0
    assert store.view(0) == bytes([5]) * NUM_BYTES


def test_an_old_kernel_counts_the_same_pages(
    store: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = store._held.live[0]
    store.write_back(0)
    drop_clean_pages(store, 0)
    os.posix_fadvise(live.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reads ahead that end later
    os.pread(live.fd, 2**20, 10 * 2**20)
    counted = pages.count_missing_bytes(live.fd, 4096 + NUM_BYTES)
    assert 0 < counted < NUM_BYTES
    monkeypatch.setattr(pages, "_SYS_CACHESTAT", 99999)
    assert pages.count_missing_bytes(live.fd, 4096 + NUM_BYTES) == counted


def test_bytes_are_those_the_kernel_counts(store: Mapped) -> None:
    store.write_back(0)
    drop_clean_pages(store, 0)
    before = kernel_bytes()
    missing_bytes = store.bring_in(0)
    read, dirtied = (b - a for a, b in zip(before, kernel_bytes(), strict=True))
    if read == 0:
        pytest.skip("this filesystem does no reads that the kernel counts")
    assert abs(read - missing_bytes) < 2**20
    assert abs(dirtied - store.write_back(0)) < 2**20


def kernel_bytes() -> list[int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(lines["read_bytes"]), int(lines["write_bytes"])]


def test_a_failed_write_is_told_and_stays_in_memory(
    store: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: memoryview) -> None:
        real(view)  # the kernel takes pages that it failed to write for clean
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    real = pages.sync_mapping
    with monkeypatch.context() as drive:
        drive.setattr(pages, "sync_mapping", fail)
        with pytest.raises(WindowWriteError, match=r"window 0.*errno 5") as caught:
            store.write_back(0)
    assert caught.value.offset == 4096
    assert caught.value.num_bytes == NUM_BYTES
    assert str(caught.value.filename).startswith(str(store._drives[0].directory))
    assert drop_clean_pages(store, 0) <= 4096
    assert store.view(0) == bytes([5]) * NUM_BYTES
    assert store.write_back(0) == NUM_BYTES


def test_a_page_that_cannot_be_read_is_an_error_and_no_signal(store: Mapped) -> None:
    store.write_back(0)
    os.truncate(f"/proc/self/fd/{store._held.live[0].fd}", 4096 + NUM_BYTES // 2)
    with pytest.raises(WindowReadError, match="truncated") as caught:
        store.bring_in(0)
    assert caught.value.offset >= 4096 + NUM_BYTES // 2 - 8 * 2**20


def test_an_old_kernel_brings_pages_in_when_they_are_touched(
    store: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    store.bring_in(0)
    assert store.view(0)[NUM_BYTES - 1] == 5


def test_a_view_outlives_the_store(store: Mapped, drive_path: Path) -> None:
    view = store.view(0)
    store.close()
    assert view[NUM_BYTES - 1] == 5
    view[:] = bytes(NUM_BYTES)
    assert is_mapped(drive_path)
    del view
    assert not is_mapped(drive_path)


def test_no_view_of_what_is_frozen(store: Mapped) -> None:
    frozen = store.freeze([0])
    with pytest.raises(AssertionError, match="prepare_write"):
        store.view(0)
    store.prepare_write(0)
    store.bring_in(0)
    store.view(0)[:] = bytes(NUM_BYTES)
    assert os.pread(frozen[0].fd, 2, 4096) == b"\x05\x05"


def test_a_snapshot_nobody_sees_is_written_over_in_place(store: Mapped) -> None:
    fd = store._held.live[0].fd
    store.freeze([0])  # and dropped
    fill(store, 0, 6)
    assert store._held.live[0].fd == fd


def test_a_freeze_before_the_copy_was_made(store: Mapped) -> None:
    """A step that failed between them must not lose what the copy was to be made of."""
    first = store.freeze([0])
    store.prepare_write(0)
    second = store.freeze([0])
    for frozen in (first, second):
        assert os.pread(frozen[0].fd, 2, 4096 + NUM_BYTES - 2) == b"\x05\x05"
    assert first[0].ordered_digests() == second[0].ordered_digests()


def test_a_forked_child_has_no_mapping_and_harms_none(store: Mapped, drive_path: Path) -> None:
    child = os.fork()
    if child == 0:
        left = is_mapped(drive_path)
        store.__dict__.clear()
        os._exit(1 if left else 0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert store.view(0) == bytes([5]) * NUM_BYTES
    assert is_mapped(drive_path)


def test_a_child_keeps_what_it_maps_there_itself(store: Mapped) -> None:
    view = store.view(0)
    address = pages.address_of(view)
    child = os.fork()
    if child == 0:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        pages._libc.mmap(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        del view
        store._held.live.clear()
        gc.collect()
        ctypes.memset(address, 1, 4096)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0


def is_mapped(directory: Path) -> bool:
    """Tell whether a file of a directory, nameless ones included, is mapped."""
    return f"{directory}/" in Path("/proc/self/maps").read_text()


def test_threads_on_different_windows(store: Mapped) -> None:
    fill(store, 1, 7)
    threads = [
        threading.Thread(target=call, args=(window,))
        for window in (0, 1)
        for call in (store.write_back, store.bring_in)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.view(0)[0] == 5
    assert store.view(1)[0] == 7


def test_a_limit_of_address_space_is_refused(
    opened: Opened, windows: Windows, drive_path: Path
) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(status["VmSize"].split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, hard))
    try:
        with pytest.raises(StoreError, match=r'cannot be mapped.*store="direct"'):
            opened("mapped", drive_path / "new").reserve(windows(2**15))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not (drive_path / "new").exists()


def test_a_second_descriptor_is_not_held(
    windows: Windows, drive_path: Path, open_files: Callable[[Path], list[str]]
) -> None:
    store = open_store("mapped", drive_path)
    store.reserve(windows(1, 1, 1))
    assert len(open_files(drive_path)) == 3
    store.close()
