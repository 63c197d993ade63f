"""Killed runs, live neighbours, forked children, exits without close."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optstream.errors import ClosedError
from optstream.store import WindowFile
from optstream.store.base import Store
from optstream.store.claim import Claim, purge_stale
from store.holder import tell

Pages = Callable[..., memoryview]
Windows = Callable[..., list[WindowFile]]
Opened = Callable[..., Store]
Child = Callable[..., "subprocess.Popen[str]"]
Holder = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(params=["nameless", "named"])
def names(request: pytest.FixtureRequest, refuse: Callable[[int, int], None]) -> str:
    if request.param == "named":
        refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    return str(request.param)


def test_two_live_processes_in_one_directory(
    names: str, holder: Holder, drive_path: Path, opened: Opened, windows: Windows, pages: Pages
) -> None:
    process = holder(names)
    store = opened("direct", drive_path)
    store.reserve(windows(256, 256))
    store.write(1, 0, pages(256, fill=9))
    other = holder(names)
    assert tell(process, "check") == tell(other, "check") == "unharmed"
    found = pages(256)
    store.read(1, 0, found)
    assert found == pages(256, fill=9)
    store.close()
    assert tell(process, "check") == tell(other, "check") == "unharmed"


def test_a_killed_run_leaves_what_the_next_start_removes(
    names: str, holder: Holder, drive_path: Path, opened: Opened, windows: Windows
) -> None:
    live = holder(names)
    before = sorted(drive_path.rglob("*"))
    killed = holder(names)
    killed.kill()
    killed.wait()
    assert (sorted(drive_path.rglob("*")) == before) == (names == "nameless")
    store = opened("direct", drive_path)
    store.reserve(windows(1))
    store.close()
    assert sorted(drive_path.rglob("*")) == before
    assert tell(live, "check") == "unharmed"


@pytest.mark.parametrize("end", ["exit", "raise", "SIGINT"])
def test_an_exit_without_close_leaves_nothing(
    names: str, end: str, holder: Holder, drive_path: Path
) -> None:
    process = holder(names)
    if end == "SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        tell(process, end)
    process.wait(timeout=10)
    assert list(drive_path.iterdir()) == []


def test_a_forked_child_that_exits_harms_nothing(
    names: str, holder: Holder, drive_path: Path
) -> None:
    process = holder(names)
    before = sorted(drive_path.rglob("*"))
    assert tell(process, "fork") == "forked"
    assert sorted(drive_path.rglob("*")) == before
    assert tell(process, "check") == "unharmed"


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], bool]], int]]:
    """Return a function that forks a child, which checks something and then sleeps."""
    pids = []

    def start(check: Callable[[], bool]) -> int:
        done, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(tell, b"1" if check() else b"0")
                time.sleep(60)
            finally:
                os._exit(1)
        pids.append(pid)
        os.close(tell)
        with open(done, "rb") as file:
            assert file.read(1) == b"1"
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_forked_child_holds_no_space_and_no_lock(
    names: str,
    fork: Callable[[Callable[[], bool]], int],
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    pages: Pages,
    on_drive: str,
) -> None:
    store = opened(on_drive, drive_path)
    store.reserve(windows(64))

    def check() -> bool:
        with pytest.raises(ClosedError, match="parent process"):
            store.read(0, 0, pages(1))
        with pytest.raises(ClosedError, match="parent process"):
            store.reserve(windows(1))
        return True

    pid = fork(check)
    held = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    assert [path for path in held if path.startswith(str(drive_path))] == []
    store.write(0, 0, pages(64, fill=5))
    found = pages(64)
    store.read(0, 0, found)
    assert found == pages(64, fill=5)


def test_a_start_purges_only_window_files(drive_path: Path) -> None:
    claim = Claim(drive_path)
    claim.file(0).touch()
    (claim.path / "notes.txt").write_text("mine")
    (claim.path / "window-00000.safetensors.keep").touch()
    purge_stale(drive_path)
    assert claim.file(0).exists()
    claim.abandon()  # as if its process died
    purge_stale(drive_path)
    assert sorted(path.name for path in claim.path.iterdir()) == [
        "notes.txt",
        "window-00000.safetensors.keep",
    ]


def test_a_link_is_not_followed_by_the_purge(drive_path: Path) -> None:
    checkpoint, directory = drive_path / "checkpoint", drive_path / "state"
    directory.mkdir()
    checkpoint.mkdir()
    (checkpoint / "window-00000.safetensors").write_text("precious")
    (directory / "optstream-live-abcdefgh").symlink_to(checkpoint)
    (directory / "optstream-live-file").touch()
    purge_stale(directory)
    assert (checkpoint / "window-00000.safetensors").read_text() == "precious"
    assert (directory / "optstream-live-file").exists()


def test_a_claim_lost_to_a_purge_is_made_anew(
    drive_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, purged = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not purged:  # between the lock file's making and its locking
            purged.append(Path(f"/proc/self/fd/{fd}").readlink().parent)
            monkeypatch.setattr(fcntl, "flock", real)
            purge_stale(drive_path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = Claim(drive_path)
    assert claim.path != purged[0]
    assert list(drive_path.iterdir()) == [claim.path]
    claim.file(0).touch()
    purge_stale(drive_path)
    assert claim.file(0).exists()
    claim.release()
    assert list(drive_path.iterdir()) == []


def test_a_filesystem_without_locks(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="37"):
        Claim(drive_path)
    assert list(drive_path.iterdir()) == []


def test_claims_and_purges_race(drive_path: Path) -> None:
    """Lock holders never lose a file, whoever starts meanwhile."""

    def start(number: int) -> bool:
        purge_stale(drive_path)
        claim = Claim(drive_path)
        claim.file(number).touch(exist_ok=False)
        purge_stale(drive_path)
        unharmed = claim.file(number).exists()
        claim.file(number).unlink()
        claim.release()
        return unharmed

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(300)))
    purge_stale(drive_path)
    assert list(drive_path.iterdir()) == []
