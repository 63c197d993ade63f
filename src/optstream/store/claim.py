"""Named files for filesystems without nameless ones: a private directory, held by a lock.

    DIR/optstream-live-XXXXXXXX/lock                        flock: its holder lives
    DIR/optstream-live-XXXXXXXX/window-00000.safetensors    ...

    creator                            | purger
    -----------------------------------+---------------------------------------
    mkdir                              | find the directory
    open lock, made if missing; flock it; check that the name still leads to that inode
    failed: purged, take another name  | failed: its holder lives, leave it
    make window files                  | remove window files, lock, directory

The kernel drops the lock with the last descriptor of a dead process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from errno import ENOTEMPTY
from pathlib import Path

from optstream import locks
from optstream.units import format_bytes

_PREFIX = "optstream-live-"
LOCK = "lock"
_NUM_ATTEMPTS = 7  # 63 ms in all
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
            try:
                lock_fd = _lock(self.path / LOCK)
            except BaseException:
                (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()
                raise
        self.lock_fd = lock_fd

    def file(self, window: int) -> Path:
        return self.path / f"window-{window:05d}.safetensors"

    def release(self) -> None:
        """Remove the directory, whose files must be gone, and drop the lock, also for forks."""
        if self.lock_fd >= 0:
            lock_fd, self.lock_fd = self.lock_fd, -1
            _remove(self.path, lock_fd)

    def abandon(self) -> None:
        """Forget it in a forked child: the parent's lock stays."""
        lock_fd, self.lock_fd = self.lock_fd, -1
        os.close(lock_fd)


@dataclass(frozen=True)
class FoundClaim:
    """A claim that is in a directory.

    Attributes:
        held: its process lives; None: it is another user's, which cannot be told.
        num_bytes: of window files that are named in it.
    """

    path: Path
    held: bool | None
    num_bytes: int


def find_claims(directory: Path) -> Iterator[FoundClaim]:
    """Yield the claims in a directory, of the living and of the dead; changes nothing."""
    for path in _claims(directory):
        try:
            yield FoundClaim(path, _lives(path), _window_bytes(path))
        except FileNotFoundError:
            continue  # it ended just now
        except OSError:
            yield FoundClaim(path, None, 0)


def of_claim(path: Path) -> Path | None:
    """Return the claim that a file's path lies in; None if in none."""
    return path.parent if path.parent.name.startswith(_PREFIX) else None


def purge_stale(directory: Path) -> None:
    """Remove what dead processes left in `directory`; never touches what a live one holds."""
    for path in _claims(directory):
        try:
            lock_fd = _lock(path / LOCK)
        except OSError:
            continue  # another user's, or removed by another purger just now
        if lock_fd is not None:
            num_bytes = _window_bytes(path)
            _remove(path, lock_fd)
            log.info("%s: removed %s that a dead run left", path, format_bytes(num_bytes))


def _claims(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.glob(_PREFIX + "*")):
        # a link was not made here; following it could lead to a checkpoint
        if path.is_dir() and not path.is_symlink():
            yield path


def _lives(path: Path) -> bool:
    try:
        return locks.is_held(path / LOCK)
    except FileNotFoundError:
        return False


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock file under this name, or None if another one does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None  # a purger was faster
    return locks.hold(fd, path)


def _remove(path: Path, lock_fd: int) -> None:
    """Remove a claimed directory and its lock; with anything in it that is not ours, it stays."""
    for file in _window_files(path):
        file.unlink(missing_ok=True)
    (path / LOCK).unlink(missing_ok=True)
    fcntl.flock(lock_fd, fcntl.LOCK_UN)  # a forked child may hold a copy
    os.close(lock_fd)
    for attempt in range(_NUM_ATTEMPTS):
        try:
            path.rmdir()
        except FileNotFoundError:
            return  # a purger was faster
        except OSError as error:
            # FUSE and NFS hide an open file that is unlinked, and drop it a moment after its close
            if error.errno != ENOTEMPTY or attempt == _NUM_ATTEMPTS - 1:
                log.warning("%s: could not be removed: %s", path, error)
                return
            time.sleep(0.001 * 2**attempt)
        else:
            return


def _window_bytes(path: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in _window_files(path))


def _window_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if _WINDOW.fullmatch(file.name)]
