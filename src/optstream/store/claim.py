"""Named files for filesystems without nameless ones: a private directory, held by a lock.

    DIR/optstream-live-XXXXXXXX/lock                        flock: its holder lives
    DIR/optstream-live-XXXXXXXX/window-00000.safetensors    ...

    creator                       | purger
    ------------------------------+-----------------------------------------------
    mkdir                         | open lock, made if missing
    make lock, fails if there     | flock, skip if held: its holder lives
    flock, fails if held          | skip unless still the inode under that name
    still that inode, else anew   | remove window files, lock, directory

Whichever gets the lock first wins; the creator that lost takes another name. The kernel drops the
lock with the last descriptor of a dead process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from pathlib import Path

from optstream.units import format_bytes

_PREFIX = "optstream-live-"
_LOCK = "lock"
_WINDOW = re.compile(r"window-\d{5,}\.safetensors")

log = logging.getLogger("optstream")


class Claim:
    """A private directory that no other process purges while this one lives."""

    def __init__(self, directory: Path) -> None:
        """Make and lock a new one inside `directory`.

        Raises:
            OSError: the filesystem refuses.
        """
        lock_fd = None
        while lock_fd is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
            lock_fd = _lock(self.path / _LOCK, os.O_CREAT | os.O_EXCL)
        self.lock_fd = lock_fd

    def file(self, window: int) -> Path:
        return self.path / f"window-{window:05d}.safetensors"

    def release(self) -> None:
        """Remove the directory, whose files must be gone, and drop the lock, also for forks."""
        if self.lock_fd >= 0:
            _remove(self.path)
            fcntl.flock(self.lock_fd, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Forget it in a forked child: the parent's lock stays."""
        os.close(self.lock_fd)
        self.lock_fd = -1


def purge_stale(directory: Path) -> None:
    """Remove what dead processes left in `directory`; never touches what a live one holds."""
    for path in directory.glob(_PREFIX + "*"):
        try:
            lock_fd = _lock(path / _LOCK, os.O_CREAT)
        except OSError:
            continue  # another user's, or removed by another purger just now
        if lock_fd is not None:
            num_bytes = sum(file.lstat().st_blocks * 512 for file in _window_files(path))
            _remove(path)
            os.close(lock_fd)
            log.info("%s: removed %s that a dead run left", path, format_bytes(num_bytes))


def _lock(path: Path, flags: int) -> int | None:
    """Return a descriptor that holds the lock file under this name, or None if another one does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except (FileExistsError, FileNotFoundError):
        return None  # a purger was faster
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove(path: Path) -> None:
    """Remove a claimed directory; with anything in it that is not ours, it stays."""
    for file in _window_files(path):
        file.unlink(missing_ok=True)
    try:
        (path / _LOCK).unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        log.warning("%s: could not be removed: %s", path, error)


def _window_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if _WINDOW.fullmatch(file.name)]
