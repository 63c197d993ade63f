"""Files and directories that are there whole and on the drive, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from optstream.errors import OutOfSpaceError, StoreError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)

TEMPORARY = ".tmp"
"""Suffix of what is not finished; nobody reads it."""
DOOMED = ".old"
"""Suffix of what is about to go; nobody reads it either."""


def write_file(path: Path, data: bytes) -> None:
    """Write a new file for its owner alone; returns when it is on the drive.

    Raises:
        StoreError: it is there already, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise failed("write", path, error) from error


def write_all(fd: int, data: memoryview, position: int) -> None:
    """Write all of these bytes from a position of a file on; OSError if that cannot be."""
    while data:
        count = os.pwritev(fd, [data], position)
        data, position = data[count:], position + count


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the drive."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> list[Path]:
    """Make a directory and the parents it lacks, for their owner alone, their names on the drive.

    Returns:
        those that were made, outermost first.

    Raises:
        OSError: one cannot be made.
    """
    made: list[Path] = []
    missing = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    for directory in reversed(missing):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process was faster
        sync(directory.parent)
        made.append(directory)
    return made


def remove_directory(path: Path) -> None:
    """Remove a directory so that no part of it is ever seen under its own name.

    Raises:
        StoreError: it cannot be removed.
    """
    doomed = path.with_name(path.name + DOOMED)
    if os.path.lexists(doomed):
        raise StoreError(
            errno.EEXIST, f"removing {path} needs the name {doomed}, which is taken; move it away"
        )
    try:
        path.rename(doomed)
        sync(path.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise failed("remove", path, error) from error


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the filesystem cannot.

    Raises:
        StoreError: it can, and refuses.
    """
    names = os.fsencode(one), os.fsencode(other)
    result = _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise StoreError(number, f"cannot put {one} in place of {other}: {os.strerror(number)}")


def failed(verb: str, path: Path, error: OSError) -> StoreError:
    """Return our error for the kernel's; one of ours is returned as it is."""
    if isinstance(error, StoreError):
        return error
    kind = OutOfSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
    return kind(error.errno, f"cannot {verb} {path}: {error.strerror or error}")
