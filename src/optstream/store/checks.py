"""Refuse what cannot work before anything is written: directories, space, limits."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from optstream.errors import ConfigError, OutOfSpaceError, StoreError
from optstream.mounts import find_mount, read_free_bytes
from optstream.units import format_bytes

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"}
_SPARE_FDS = 64  # for everything else the process opens later: sockets, checkpoints, data loaders


def make_directory(path: Path) -> list[Path]:
    """Make sure that a directory can hold state; return those made for it, outermost first.

    Raises:
        StoreError: not a directory, cannot be made or written, or its files would be in memory.
    """
    missing = missing_directories(path)
    check_directory(missing[0].parent if missing else path, path)
    made: list[Path] = []
    try:
        for directory in missing:
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                continue  # another rank was faster
            made.append(directory)
    except OSError as error:
        remove_directories(made)
        raise _refusal(path, error) from error
    return made


def missing_directories(path: Path) -> list[Path]:
    """Return what has to be made for a directory to be there, outermost first."""
    missing: list[Path] = []
    while not os.path.lexists(path):
        missing.insert(0, path)
        path = path.parent
    return missing


def remove_directories(made: Sequence[Path]) -> None:
    """Remove directories that `make_directory` made, unless something is in them by now."""
    for directory in reversed(made):
        try:
            directory.rmdir()
        except OSError:
            return


def check_directory(existing: Path, path: Path) -> None:
    """Raise StoreError unless files below `existing`, for state in `path`, would be on a drive."""
    if not existing.is_dir():
        raise StoreError(
            errno.ENOTDIR, f"{existing} is no directory; choose a directory on a drive"
        )
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass  # it will be made
    except OSError as error:  # a name that is too long
        raise _refusal(path, error) from error
    mount = find_mount(existing)
    if mount and mount.kind == "overlay":
        layers = [o.removeprefix("upperdir=") for o in mount.options if o.startswith("upperdir=")]
        # the path is as the one who mounted it saw it; in a container it often leads nowhere
        mount = find_mount(Path(layers[0])) if layers else mount
    if mount and mount.kind in _MEMORY_FILESYSTEMS:
        raise StoreError(
            errno.EINVAL,
            f"{path} is {mount.kind}, so the state would stay in RAM; "
            'choose a path on a drive, or store="memory" (--store memory)',
        )
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise StoreError(errno.EROFS, f"{path} is on a read-only filesystem; choose another drive")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _refusal(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def check_space(needs: Sequence[tuple[Path, int]], what: str = "state") -> None:
    """Check free space, counting directories on one filesystem together.

    Args:
        needs: (directory, bytes of one file to be made there).
        what: is to be put there, for the error.

    Raises:
        OutOfSpaceError: with needed and free bytes, as given to unprivileged users.
    """
    drives: dict[int, dict[Path, list[int]]] = {}
    for path, num_bytes in needs:
        drives.setdefault(path.stat().st_dev, {}).setdefault(path, []).append(num_bytes)
    for files in drives.values():
        names = " and ".join(str(path) for path in files)
        place = next(iter(files))
        free, free_bytes = os.statvfs(place), read_free_bytes(place)
        needed_bytes = sum(map(sum, files.values()))
        if needed_bytes > free_bytes:
            raise OutOfSpaceError(
                errno.ENOSPC,
                f"{what} needs {format_bytes(needed_bytes)}, {names} has "
                f"{format_bytes(free_bytes)} free; free "
                f"{format_bytes(needed_bytes - free_bytes)} or give a second directory",
            )
        num_files = sum(map(len, files.values()))
        if free.f_files and num_files > free.f_favail:
            raise OutOfSpaceError(
                errno.ENOSPC,
                f"{what} needs {num_files} files, {names} has {free.f_favail} inodes free; "
                "give a larger window or another drive",
            )


def reserve_refused(path: Path, needed_bytes: int, error: OSError) -> OSError:
    """Return the error of a drive that refused a file although there seemed to be enough space."""
    number = error.errno or errno.EIO
    full = number in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, StoreError) and not full:
        return error
    return (OutOfSpaceError if full else StoreError)(
        number,
        f"state needs {format_bytes(needed_bytes)} in {path}, which has "
        f"{format_bytes(read_free_bytes(path))} free but refused: {os.strerror(number)}; "
        "check quotas, limits and other writers, or choose another directory",
    )


def check_limits(num_files: int, largest_bytes: int) -> None:
    """Make room for one descriptor a window, raising the soft limit where the hard one allows it.

    Raises:
        StoreError: the process may not have so many open files, or none so large.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list(Path("/proc/self/fd").iterdir())) + num_files + _SPARE_FDS
    if soft != resource.RLIM_INFINITY and needed > soft:
        if hard != resource.RLIM_INFINITY and needed > hard:
            raise StoreError(
                errno.EMFILE,
                f"state needs {num_files} open files, one a window, and the process may have "
                f"{hard} in all; give a larger window or raise the limit to {needed} (ulimit -n)",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and largest_bytes > soft:
        raise StoreError(
            errno.EFBIG,
            f"a window file needs {format_bytes(largest_bytes)} and the process may write files of "
            f"{format_bytes(soft)}; give a smaller window or raise the limit (ulimit -f)",
        )


def distinct(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return directories as absolute paths.

    Raises:
        ConfigError: none at all, one that is no path, or one given twice.
    """
    paths = [absolute(directory) for directory in directories]
    if not paths:
        raise ConfigError("no directory is given; give at least one on a drive")
    real = [os.path.realpath(path) for path in paths]
    for path in paths:
        if real.count(os.path.realpath(path)) > 1:
            raise ConfigError(f"directory {path} is given twice; give each drive once")
    return paths


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Return a directory as an absolute path, so that a later chdir does not move it.

    Raises:
        ConfigError: no path at all.
    """
    try:
        text = os.fspath(directory)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"directory={directory!r} is no path; give a directory on a drive")
    return Path(text).expanduser().absolute()


def _refusal(path: Path, error: OSError) -> StoreError:
    number = error.errno or errno.EIO
    return StoreError(
        number,
        f"{path} cannot hold the state: {os.strerror(number)}; "
        "choose a directory that you can write",
    )
