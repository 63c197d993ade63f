"""PATH.tmp: a directory that becomes PATH in one step, or is removed.

PATH.tmp           made and locked by the save; unlocked: a dead run's, removed
PATH.tmp -> PATH   one rename; over an older checkpoint an exchange, then that one goes
PATH.replaced      where the filesystem cannot exchange: the older one, for a moment
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from optstream import durable, locks
from optstream.checkpoint.inside import list_inside, read_inside
from optstream.checkpoint.manifest_checks import WINDOW_FILE
from optstream.checkpoint.manifest_json import MARK
from optstream.errors import StoreError

MANIFEST = "manifest.json"
log = logging.getLogger("optstream")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Make and hold PATH.tmp; it is removed unless it was renamed away."""
    staging = staging_path(path)
    durable.make_directories(path.parent)
    lock = None
    while lock is None:
        try:
            staging.mkdir(mode=0o700)
        except FileExistsError:
            _remove_dead(staging, path)
            continue
        lock = _lock(staging)
    try:
        yield staging
    finally:
        if locks.is_at(lock, staging):  # not where it was renamed, and another save made its own
            shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def commit(staging: Path, path: Path) -> None:
    """Give the whole directory its name; an older one under that name goes afterwards."""
    replaced = replaced_path(path)
    exchanged = False
    if not os.path.lexists(path):
        staging.rename(path)
    elif durable.exchange(staging, path):
        exchanged = True
    else:
        _remove(replaced)
        path.rename(replaced)
        staging.rename(path)
    durable.sync(path.parent)
    _remove(replaced)
    if exchanged:
        _remove(staging)


def staging_path(path: Path) -> Path:
    return path.with_name(path.name + durable.TEMPORARY)


def replaced_path(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def _remove_dead(staging: Path, path: Path) -> None:
    lock = _lock(staging)
    if lock is None:
        if os.path.lexists(staging):
            raise StoreError(errno.EBUSY, f"another process is saving to {path}; choose another")
        return
    try:
        if find_foreign(staging):
            raise StoreError(
                errno.EEXIST,
                f"a save to {path} needs the name {staging}, where something else is; move it away",
            )
        log.info("%s: removed what a killed save left", staging)
        shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def find_foreign(directory: Path) -> str:
    """Return the first name in a directory that no save, finished or not, put there; "" if none.

    Raises:
        OSError: the directory cannot be read.
    """
    for name in list_inside(directory):
        if not (name == MANIFEST and _is_marked(directory)) and not WINDOW_FILE.fullmatch(name):
            return name
    return ""


def _is_marked(directory: Path) -> bool:
    """Tell whether its manifest is ours, or the beginning of one."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        start = read_inside(fd, MANIFEST, len(MARK))
    except OSError:
        return False
    finally:
        os.close(fd)
    return MARK.startswith(start)


def _lock(directory: Path) -> int | None:
    """Return a descriptor that locks the directory of this name; None if another one does."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return locks.hold(fd, directory)
    return None


def _remove(replaced: Path) -> None:
    """Remove a checkpoint that was replaced; another save may be doing that, or use its name."""
    if replaced.is_symlink():
        replaced.unlink()
        return
    lock = _lock(replaced)
    if lock is None:
        return
    if not find_foreign(replaced):
        shutil.rmtree(replaced, ignore_errors=True)
    if locks.is_at(lock, replaced):
        log.warning("%s, which was replaced, could not be removed", replaced)
    os.close(lock)
