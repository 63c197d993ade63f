"""The direct store on real filesystems, made in image files and mounted (needs root)."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.errors import OutOfSpaceError, StoreError
from optstream.store import WindowFile
from optstream.store.base import Store
from optstream.units import format_bytes

Pages = Callable[..., memoryview]
Windows = Callable[..., list[WindowFile]]
Mounted = Callable[..., Path]
Opened = Callable[..., Store]

DIRECT: list[str] = []
NO_RESERVE = ["cannot reserve space"]
NO_NAMES = ["no nameless files"]
NO_DIRECT = ["does no direct I/O"]


def _num_cached_pages(fd: int, num_bytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, num_bytes, 1, 1, fd, 0)
    cached = ctypes.create_string_buffer(num_bytes // 4096)
    assert libc.mincore(address, num_bytes, cached) == 0
    libc.munmap(address, num_bytes)
    return sum(byte & 1 for byte in cached.raw)


def _fds_below(path: Path) -> list[int]:
    """Return the descriptors of window files."""
    fds = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if fd.readlink().name != "lock" and fd.readlink().is_relative_to(path):
                fds.append(int(fd.name))
        except FileNotFoundError:
            pass
    return fds


def _free_blocks(path: Path) -> tuple[int, int]:
    free = os.statvfs(path)
    return free.f_bfree, free.f_ffree


def _wait_until_free(path: Path, wanted: tuple[int, int], slack_blocks: int = 0) -> None:
    """Wait for space that XFS and btrfs give back in the background."""
    for _ in range(100):
        os.sync()
        blocks, inodes = _free_blocks(path)
        if blocks >= wanted[0] - slack_blocks and inodes >= wanted[1]:
            return
        time.sleep(0.05)
    pytest.fail(f"free is {(blocks, inodes)}, was {wanted}")


@pytest.mark.parametrize(
    ("kind", "options", "size", "warnings"),
    [
        ("ext4", [], {}, DIRECT),
        ("ext4", [], {"sector": 4096}, DIRECT),
        ("ext4", ["data=journal"], {}, NO_DIRECT),
        ("ext3", [], {}, NO_RESERVE),
        ("xfs", [], {"mib": 320}, DIRECT),
        ("xfs", [], {"mib": 320, "sector": 4096}, DIRECT),
        ("btrfs", [], {"mib": 160}, DIRECT),
        ("fuse.ext4", [], {}, NO_NAMES),
    ],
)
def test_round_trip_without_page_cache_or_leftovers(
    kind: str,
    options: list[str],
    size: dict[str, int],
    warnings: list[str],
    mounted: Mounted,
    opened: Opened,
    pages: Pages,
    windows: Windows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    point = mounted(kind, *options, **size)
    directory = point / "state"
    directory.mkdir()
    free = _free_blocks(point)
    store = opened("direct", directory)
    store.reserve(windows(1024, 1024))
    fds = _fds_below(point)
    assert len(fds) == 2
    assert all(os.fstat(fd).st_blocks * 512 >= 1025 * 4096 for fd in fds)
    wanted, found = pages(1024, fill=3), pages(1024, fill=99)
    for _ in range(2):
        store.write(1, 0, wanted)
    store.read(1, 0, found)
    assert found == wanted
    for fd in fds:
        assert os.fstat(fd).st_size == 1025 * 4096
        assert _num_cached_pages(fd, 1025 * 4096) == 0
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(texts) == len(warnings)
    for text, warning in zip(texts, warnings, strict=True):
        assert warning in text
        assert str(directory) in text
    store.close()
    assert list(directory.iterdir()) == []
    _wait_until_free(point, free, slack_blocks=64 if kind == "btrfs" else 0)


def test_files_are_what_they_should_be(
    mounted: Mounted, opened: Opened, pages: Pages, windows: Windows
) -> None:
    point = mounted("ext4")
    store = opened("direct", point)
    store.reserve(windows(2))
    store.write(0, 4096, pages(1, fill=5))
    (fd,) = _fds_below(point)
    status = os.fstat(fd)
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == (
        b"header".ljust(4096) + bytes(4096) + bytes(pages(1, fill=5))
    )


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_filesystems_are_refused(
    kind: str, mounted: Mounted, opened: Opened, on_drive: str
) -> None:
    point = mounted(kind)
    store = opened(on_drive, point / "new" / "state")
    with pytest.raises(StoreError) as caught:
        store.reserve([])
    assert str(caught.value) == (
        f"{point}/new/state is {kind}, so the state would stay in RAM; "
        'choose a path on a drive, or store="memory" (--store memory)'
    )
    assert list(point.iterdir()) == []


def test_memory_behind_a_bind_mount_is_refused(
    mounted: Mounted, opened: Opened, tmp_path: Path, on_drive: str
) -> None:
    (mounted("tmpfs") / "inside").mkdir()
    point = mounted("none", "bind", source=tmp_path / "mount0" / "inside")
    with pytest.raises(StoreError, match="is tmpfs, so the state would stay in RAM"):
        opened(on_drive, point).reserve([])


@pytest.mark.parametrize(("upper", "refused"), [("tmpfs", True), ("ext4", False)])
def test_overlay_is_judged_by_its_upper_layer(
    upper: str,
    refused: bool,
    mounted: Mounted,
    opened: Opened,
    windows: Windows,
    pages: Pages,
    on_drive: str,
) -> None:
    layer = mounted(upper)
    for name in ("lower", "upper", "work"):
        (layer / name).mkdir()
    point = mounted(
        "overlay",
        f"lowerdir={layer}/lower",
        f"upperdir={layer}/upper",
        f"workdir={layer}/work",
    )
    store = opened(on_drive, point)
    if refused:
        with pytest.raises(StoreError, match="is tmpfs, so the state would stay in RAM"):
            store.reserve([])
        return
    store.reserve(windows(4))
    wanted, found = pages(4, fill=3), pages(4)
    store.write(0, 0, wanted)
    store.read(0, 0, found)
    assert found == wanted


def test_a_read_only_filesystem_is_refused(mounted: Mounted, opened: Opened, on_drive: str) -> None:
    point = mounted("ext4", "ro")
    with pytest.raises(StoreError, match="read-only filesystem") as caught:
        opened(on_drive, point / "state").reserve([])
    assert str(point / "state") in str(caught.value)


def test_directories_on_one_drive_are_counted_together(
    mounted: Mounted, opened: Opened, windows: Windows, on_drive: str
) -> None:
    point = mounted("ext4")
    free = _free_blocks(point)
    store = opened(on_drive, [point / "a", point / "b"])
    half_pages = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize // 4096 * 2 // 3
    with pytest.raises(OutOfSpaceError, match=r"state needs .* MiB, .*/a and .*/b has .* free"):
        store.reserve(windows(half_pages, half_pages))
    assert _free_blocks(point) == free
    assert {path.name for path in point.iterdir()} == {"lost+found"}
    store.reserve(windows(half_pages))


@pytest.mark.parametrize(("kind", "size"), [("ext4", {}), ("ext3", {}), ("xfs", {"mib": 320})])
def test_a_drive_that_fills_up_while_reserving(
    kind: str,
    size: dict[str, int],
    mounted: Mounted,
    opened: Opened,
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    on_drive: str,
) -> None:
    point = mounted(kind, **size)
    free = _free_blocks(point)
    num_pages = free[0] * os.statvfs(point).f_bsize // 4096
    monkeypatch.setattr("optstream.store.on_drive.check_space", lambda needs: None)
    store = opened(on_drive, point / "state")
    with pytest.raises(OutOfSpaceError, match=r"state needs .* in .*/state, which has ") as caught:
        store.reserve(windows(*[num_pages // 4] * 5))
    if kind != "xfs":  # which counts given back space as free a little later
        avail = os.statvfs(point)
        assert f"{format_bytes(avail.f_bavail * avail.f_frsize)} free" in str(caught.value)
    assert not (point / "state").exists()
    _wait_until_free(point, free)


def test_what_only_root_may_use_is_not_free(
    mounted: Mounted, opened: Opened, windows: Windows, on_drive: str
) -> None:
    point = mounted("ext4", mkfs="-m 20")
    free = os.statvfs(point)
    num_pages = (free.f_bavail + free.f_bfree) // 2 * free.f_bsize // 4096
    with pytest.raises(OutOfSpaceError, match=r" free; free .* or give a second directory"):
        opened(on_drive, point).reserve(windows(num_pages))


def test_too_few_inodes(mounted: Mounted, opened: Opened, windows: Windows, on_drive: str) -> None:
    point = mounted("ext4", mkfs="-N 16")
    num_files = os.statvfs(point).f_favail + 1
    store = opened(on_drive, point / "state")
    with pytest.raises(OutOfSpaceError, match=rf"needs {num_files} files, .* has \d+ inodes free"):
        store.reserve(windows(*[1] * num_files))


def test_reserved_space_serves_every_rewrite(
    mounted: Mounted, opened: Opened, windows: Windows, pages: Pages
) -> None:
    # a copy-on-write filesystem would need as much space again
    point = mounted("btrfs", mib=160)
    free = os.statvfs(point)
    num_pages = free.f_bavail * free.f_frsize // 4096 - 256
    store = opened("direct", point)
    store.reserve(windows(num_pages))
    buffer = pages(256, fill=1)
    for _ in range(3):
        for page in range(0, num_pages - 255, 256):
            store.write(0, page * 4096, buffer)
