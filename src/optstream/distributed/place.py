"""The place of one rank in a directory that others use too: a folder of its own, under a lock.

    DIR/rank00000        held by flock while its process lives
    DIR/rank00000.1      the same rank of another job
    DIR/actor-rank00000  another optimizer of one process tree, by its role

The kernel drops the lock with the last descriptor of a dead process; what that one left is removed
by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from optstream import locks
from optstream.errors import ConfigError
from optstream.store.checks import absolute, make_directory, remove_directories
from optstream.store.claim import purge_stale

StrPath = str | os.PathLike[str]
_PLACE = re.compile(r"([\w-]+-)?rank\d{5,}(\.\d+)?", re.ASCII)
_ROLE = re.compile(r"[\w-]*", re.ASCII)


class Place:
    """A folder that no other process uses while this one lives."""

    def __init__(self, directory: Path, role: str, rank: int) -> None:
        """Make and lock it.

        Raises:
            StoreError: the directory cannot hold state.
        """
        self._made: list[Path] = []
        prefix = f"{role}-" if role else ""
        for number in itertools.count():
            path = directory / f"{prefix}rank{rank:05d}{f'.{number}' if number else ''}"
            lock = self._take(path)
            if lock is not None:
                self.path, self._lock = path, lock
                break
        remove_left(directory)

    def _take(self, path: Path) -> int | None:
        while True:
            made = make_directory(path)
            with contextlib.suppress(FileNotFoundError):  # removed by a rank that looked for dead
                lock = lock_directory(path)
                if lock is None:
                    remove_directories(made)
                    return None
                self._made += made
                return lock

    def release(self) -> None:
        """Remove the folder, if it is empty, and give up the lock, also for forked children.

        Folders above that were made for it go too, unless other ranks are still there.
        """
        if self._lock >= 0:
            remove_directories([*(path for path in self._made if path != self.path), self.path])
            lock, self._lock = self._lock, -1
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def check_role(role: str) -> None:
    """Raise ConfigError unless a role can be part of a name."""
    if not _ROLE.fullmatch(role):
        raise ConfigError(f"role={role!r}: give letters, digits, _ and - only, such as 'actor'")


def take_places(directories: StrPath | Sequence[StrPath], role: str, rank: int) -> list[Place]:
    """Take a place in each of several directories.

    Raises:
        ConfigError: a role that cannot be part of a name.
        StoreError: a directory cannot hold state; nothing is left there.
    """
    check_role(role)
    if isinstance(directories, str | bytes) or not isinstance(directories, Sequence):
        directories = [directories]
    places: list[Place] = []
    try:
        for directory in directories:
            places.append(Place(absolute(directory), role, rank))
    except BaseException:
        release(places)
        raise
    return places


def release(places: Sequence[Place]) -> None:
    """Give all of them up."""
    for place in places:
        place.release()


def lock_directory(path: Path) -> int | None:
    """Return a descriptor that locks the directory of this name; None if another one does.

    Raises:
        FileNotFoundError: it is gone, or another one has its name by now.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if locks.is_at(fd, path):
            return fd
        raise FileNotFoundError(path)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise


def remove_left(directory: Path) -> None:
    """Remove places whose processes are gone, with what those left in them."""
    for path in _places(directory):
        with contextlib.suppress(OSError):  # another one is faster, or it is another user's
            lock = lock_directory(path)
            if lock is None:
                continue
            try:
                purge_stale(path)
                path.rmdir()
            finally:
                os.close(lock)


def is_place(path: Path) -> bool:
    """Tell whether a directory of this name would be a place."""
    return _PLACE.fullmatch(path.name) is not None


def find_places(directory: Path) -> dict[Path, bool | None]:
    """Return the places in a directory, and whether their processes live; changes nothing.

    None: it is another user's, which cannot be told.
    """
    return {path: _lives(path) for path in _places(directory)}


def _lives(path: Path) -> bool | None:
    try:
        return locks.is_held(path)
    except OSError:
        return None


def _places(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if is_place(path) and path.is_dir() and not path.is_symlink():
            yield path
