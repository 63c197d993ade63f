"""Files inside a directory that is opened once, whatever takes its name meanwhile.

Neither a file nor a directory in it may be a link that leads elsewhere, nor a FIFO to wait for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_inside(directory: int, name: str) -> int:
    """Return a descriptor of an ordinary file.

    Args:
        directory: a descriptor.
        name: relative to it; at most one level deep.

    Raises:
        OSError: there is none.
    """
    folder, _, last = name.rpartition("/")
    parent = os.open(folder or ".", _FLAGS | os.O_DIRECTORY, dir_fd=directory)
    try:
        fd = os.open(last, _FLAGS | os.O_NONBLOCK, dir_fd=parent)
    finally:
        os.close(parent)
    if S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no ordinary file")


def read_inside(directory: int, name: str, limit_bytes: int = -1) -> bytes:
    """Return the bytes of a file, or their start; see `open_inside`."""
    with os.fdopen(open_inside(directory, name), "rb") as file:
        return file.read(limit_bytes)


def list_inside(directory: Path) -> Iterator[str]:
    """Yield the names of what is in a directory; a directory's own contents in its place."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from sorted(f"{entry.name}/{path.name}" for path in Path(entry).iterdir())
        else:
            yield entry.name
