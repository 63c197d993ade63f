"""Directories and limits that are refused, made or raised before anything is written."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optstream.errors import ConfigError, OffloadError, StoreError
from optstream.store import WindowFile, open_store
from optstream.store.base import Store

Windows = Callable[..., list[WindowFile]]
Opened = Callable[..., Store]


@pytest.mark.parametrize("kind", ["", "Direct", "ram"])
def test_an_unknown_kind(kind: str) -> None:
    with pytest.raises(ConfigError, match='choose one of "direct"'):
        open_store(kind, "/tmp")


@pytest.mark.parametrize("directories", ["", [], [""], [None], [b"/tmp"], ["a\0b"], 7, None])
def test_no_path(directories: object, on_drive: str) -> None:
    with pytest.raises(ConfigError, match=r"give .*on a drive"):
        open_store(on_drive, directories)  # type: ignore[arg-type]


def test_a_directory_given_twice(drive_path: Path, on_drive: str) -> None:
    (drive_path / "link").symlink_to(drive_path)
    for again in (drive_path, drive_path / "x" / "..", drive_path / "link"):
        with pytest.raises(ConfigError, match="is given twice"):
            open_store(on_drive, [drive_path, again])


def test_a_missing_directory_is_made_private(
    drive_path: Path, opened: Opened, windows: Windows, on_drive: str
) -> None:
    opened(on_drive, drive_path / "a" / "b").reserve(windows(1))
    for path in (drive_path / "a", drive_path / "a" / "b"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_what_was_made_is_removed_if_the_rest_cannot_be(
    drive_path: Path, opened: Opened, on_drive: str
) -> None:
    with pytest.raises(StoreError, match="cannot hold the state: File name too long"):
        opened(on_drive, drive_path / "a" / "b" / ("x" * 300)).reserve([])
    assert list(drive_path.iterdir()) == []


def test_opening_touches_nothing(drive_path: Path, opened: Opened, on_drive: str) -> None:
    opened(on_drive, drive_path / "a")
    assert list(drive_path.iterdir()) == []


def test_a_relative_directory_survives_chdir(
    drive_path: Path, opened: Opened, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(drive_path)
    store = opened("direct", "a")
    store.reserve(windows(1))
    monkeypatch.chdir("/")
    store.reserve(windows(1))
    assert [path.name for path in drive_path.iterdir()] == ["a"]


@pytest.mark.parametrize("below", ["", "more"])
def test_a_file_in_its_place(drive_path: Path, below: str, opened: Opened, on_drive: str) -> None:
    (drive_path / "file").touch()
    with pytest.raises(StoreError, match=r"/file is no directory"):
        opened(on_drive, drive_path / "file" / below).reserve([])


def test_a_dangling_link(drive_path: Path, opened: Opened, on_drive: str) -> None:
    (drive_path / "link").symlink_to("nowhere")
    with pytest.raises(StoreError, match=r"/link is no directory"):
        opened(on_drive, drive_path / "link").reserve([])


def test_an_unwritable_directory(drive_path: Path, opened: Opened, on_drive: str) -> None:
    closed = drive_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid() == 0:
        pid = os.fork()
        if pid == 0:  # root may write anywhere
            try:
                drive_path.parent.parent.chmod(0o755)
                drive_path.parent.chmod(0o755)
                drive_path.chmod(0o755)
                os.setuid(65534)
                with pytest.raises(StoreError, match="closed/state cannot hold the state: Perm"):
                    open_store(on_drive, closed / "state").reserve([])
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        with pytest.raises(StoreError, match="closed/state cannot hold the state: Permission"):
            opened(on_drive, closed / "state").reserve([])


@pytest.fixture
def limit() -> Iterator[Callable[[int, int, int], None]]:
    """Return `setrlimit` whose soft limits are put back; hard ones cannot be, so none is set."""
    kept = {
        kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    }
    yield lambda kind, soft: resource.setrlimit(kind, (soft, kept[kind][1]))
    for kind, limits in kept.items():
        resource.setrlimit(kind, limits)


def test_the_soft_limit_of_open_files_is_raised(
    drive_path: Path, opened: Opened, windows: Windows, limit: Callable[..., None], on_drive: str
) -> None:
    limit(resource.RLIMIT_NOFILE, 100)
    opened(on_drive, drive_path).reserve(windows(*[1] * 150))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 214


def test_the_hard_limit_of_open_files(
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    on_drive: str,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 120))
    with pytest.raises(StoreError, match=r"needs 150 open files.* may have 120 .*ulimit -n") as e:
        opened(on_drive, drive_path / "a").reserve(windows(*[1] * 150))
    assert e.value.errno == errno.EMFILE
    assert list(drive_path.iterdir()) == []


def test_the_limit_of_file_sizes(
    drive_path: Path, opened: Opened, windows: Windows, limit: Callable[..., None], on_drive: str
) -> None:
    limit(resource.RLIMIT_FSIZE, 2**20)
    with pytest.raises(StoreError, match=r"needs 1\.0 MiB .*files of 1\.0 MiB.*ulimit -f"):
        opened(on_drive, drive_path).reserve(windows(256))
    opened(on_drive, drive_path).reserve(windows(255))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT])
def test_named_files_are_announced_once(
    number: int,
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    refuse: Callable[[int, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse(os.O_TMPFILE, number)
    store = opened("direct", drive_path)
    store.reserve(windows(1, 1))
    store.reserve(windows(1))
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "optstream")
    assert f"{drive_path}: " in record.getMessage()
    assert "no nameless files" in record.getMessage()
    (claim,) = drive_path.iterdir()
    assert claim.stat().st_mode & 0o777 == 0o700
    files = sorted(claim.iterdir())
    assert [file.name for file in files] == [
        "lock",
        *(f"window-{window:05d}.safetensors" for window in range(3)),
    ]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_a_filesystem_that_makes_the_file_before_it_refuses_direct(
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    refuse: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.open

    def open_(path: str, flags: int, *args: int) -> int:
        fd = real(path, flags, *args)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "")
        return fd

    monkeypatch.setattr(os, "open", open_)
    refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    opened("direct", drive_path).reserve(windows(1, 1))


@pytest.mark.parametrize("align_bytes", [0, 8192])
def test_an_unusable_alignment_is_announced(
    align_bytes: int,
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("optstream.store.linux.direct_align_bytes", lambda fd: align_bytes)
    store = opened("direct", drive_path)
    store.reserve(windows(1, 1))
    (record,) = caplog.records
    assert f"{drive_path}: " in record.getMessage()
    assert "buffered transfers" in record.getMessage()


def test_errors_are_of_our_kind_and_say_what_to_do(drive_path: Path) -> None:
    with pytest.raises(OffloadError) as caught:
        open_store("direct", drive_path).reserve([WindowFile(b" " * 4096, 2**60)])
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).startswith("state needs 1048576.0 TiB, ")
    assert "[Errno" not in str(caught.value)
