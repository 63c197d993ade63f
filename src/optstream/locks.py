"""Locks on files and directories (flock); the kernel drops those of a process that died."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(fd: int, path: Path) -> int | None:
    """Lock an open file or directory and return its descriptor; on any other end it is closed.

    Returns:
        None if another one holds it, or if the name leads elsewhere by now.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def is_at(fd: int, path: Path) -> bool:
    """Tell whether a name leads to what a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Tell whether somebody holds a file or directory; changes nothing.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
