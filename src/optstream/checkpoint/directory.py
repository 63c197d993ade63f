"""Checkpoints on a filesystem: a directory that is there whole, or not at all.

    PATH.tmp/                  made and locked by the save; unlocked: a dead run's, removed
      rank00000/window00000.safetensors ...    links to the frozen files (copies on other
      filesystems) manifest.json            last, when all files are durable
    PATH.tmp -> PATH           one rename; over an older checkpoint an exchange, then that one goes
    PATH.replaced              where the filesystem cannot exchange: the older one, for a moment

Ordering: files, then their directory, then the manifest, then the rename, then the parent are made
durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.snapshot import Snapshot
from optstream.errors import CheckpointError, OutOfSpaceError, StoreError, WindowReadError
from optstream.store.base import PIECE_BYTES, FrozenFile
from optstream.store.files import check_digest
from optstream.store.linux import link
from optstream.units import format_bytes

MANIFEST = "manifest.json"
_CANNOT_LINK = (
    errno.EXDEV,
    errno.ENOENT,  # a nameless file whose links are all gone
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
)
_RANK = re.compile(r"rank\d{5}", re.ASCII)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

log = logging.getLogger("optstream")
_libc = ctypes.CDLL(None, use_errno=True)


def check_target(path: Path) -> None:
    """Refuse a path that a checkpoint cannot be saved to, before anything is done.

    Raises:
        StoreError: something else than a checkpoint is there, or it cannot be written.
    """
    is_checkpoint = (path / MANIFEST).is_file()
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_checkpoint and not is_empty:
        raise StoreError(errno.EEXIST, f"{path} is there and is no checkpoint; choose another path")
    parent = existing_parent(path)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(errno.EACCES, f"cannot save to {path}: {parent} is not writable")


def existing_parent(path: Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def check_space(path: Path, needed_bytes: int) -> None:
    """Raise OutOfSpaceError unless the filesystem of `path` has this much room for copies."""
    free = os.statvfs(existing_parent(path))
    free_bytes = free.f_bavail * free.f_frsize
    if needed_bytes > free_bytes:
        raise OutOfSpaceError(
            errno.ENOSPC,
            f"a checkpoint in {path} needs copies of {format_bytes(needed_bytes)}, there are "
            f"{format_bytes(free_bytes)} free; free space, or save on the drive of the state",
        )


def publish(snapshot: Snapshot, path: Path) -> None:
    """Make a snapshot a checkpoint at `path`; an older one there stays until the new one is whole.

    Raises:
        StoreError: another save to this path is under way, or the filesystem refuses; what was at
            `path` before is still there.
    """
    manifest = snapshot.manifest.to_json()
    try:
        _publish(snapshot, manifest, path)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(error.errno, f"cannot save to {path}: {error}") from error


def _publish(snapshot: Snapshot, manifest: bytes, path: Path) -> None:
    with _staging(path) as staging:
        for window, file in snapshot.files.items():
            target = staging / snapshot.manifest.windows[window].file
            if not target.parent.is_dir():
                target.parent.mkdir(mode=0o700)
            _place(file, target)
        for folder in {(staging / window.file).parent for window in snapshot.manifest.windows}:
            if folder.is_dir():
                _sync(folder)
        _write(staging / MANIFEST, manifest)
        _sync(staging)
        _commit(staging, path)


def open_checkpoint(path: Path) -> Snapshot:
    """Open a checkpoint; its structure is checked, its bytes are not read (see `verify`).

    Raises:
        CheckpointError: no checkpoint there, or a file is missing, truncated or another one.
        FormatError: the manifest is damaged or newer.
    """
    replaced = _replaced(path)
    if not path.exists() and (replaced / MANIFEST).is_file():
        log.warning("%s is gone, a save was killed while it replaced it; using %s", path, replaced)
        path = replaced
    manifest_path = path / MANIFEST
    try:
        data = manifest_path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is no checkpoint: {manifest_path.name} cannot be read ({error.strerror})"
        ) from error
    manifest = Manifest.from_json(data, str(manifest_path))
    files = {
        index: _open_window(path, window.file, window.header_bytes, window.data_bytes)
        for index, window in enumerate(manifest.windows)
        if window.file
    }
    for index, file in files.items():
        window = manifest.windows[index]
        offsets = (-file.header_bytes, *range(0, file.data_bytes, manifest.piece_bytes))
        file.digests.update(zip(offsets, window.digests, strict=True))
        header = os.pread(file.fd, file.header_bytes, 0)
        check_digest(memoryview(header), file.digests[-file.header_bytes], file.name, 0)
    return Snapshot(manifest, files, path)


def verify(snapshot: Snapshot) -> None:
    """Read every byte and hold it against its digest.

    Raises:
        WindowReadError: the first piece that is not what was written, or cannot be read.
    """
    buffer = memoryview(bytearray(snapshot.manifest.piece_bytes))
    for file in snapshot.files.values():
        for offset, piece in _pieces(file, buffer):
            check_digest(piece, file.digests[offset], file.name, file.header_bytes + offset)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_window(checkpoint: Path, name: str, header_bytes: int, data_bytes: int) -> FrozenFile:
    path = checkpoint / name
    try:
        fd = _open_inside(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    file = FrozenFile(fd, str(path), header_bytes, data_bytes, {})
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no ordinary file")
    if found.st_size != file.file_bytes:
        raise CheckpointError(
            f"{path} has {found.st_size} bytes, the manifest says {file.file_bytes}; truncated?"
        )
    return file


def _open_inside(path: Path) -> int:
    """Open a window's file; neither it nor its directory may be a link that leads elsewhere."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    directory = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        # a FIFO in place of a file would be waited for
        return os.open(path.name, flags | os.O_NONBLOCK, dir_fd=directory)
    finally:
        os.close(directory)


def _pieces(file: FrozenFile, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the data, bytes) of a file's data, through a bounded buffer."""
    for offset in range(0, file.data_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), file.data_bytes - offset)]
        done = 0
        while done < len(piece):
            position = file.header_bytes + offset + done
            try:
                count = os.preadv(file.fd, [piece[done:]], position)
            except OSError as error:
                number = error.errno or errno.EIO
                raise WindowReadError(file.name, position, len(piece), number) from error
            if count == 0:
                raise WindowReadError(file.name, position, len(piece), errno.EIO, "it ends there")
            done += count
        yield offset, piece


@contextlib.contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Make and hold PATH.tmp; it is removed unless it was renamed away."""
    staging = path.with_name(path.name + ".tmp")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        if _is_at(lock, staging):  # not where it was renamed, and another save made its own
            shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _remove_dead(staging: Path, path: Path) -> None:
    lock = _lock(staging)
    if lock is None:
        if os.path.lexists(staging):
            raise StoreError(errno.EBUSY, f"another process is saving to {path}; choose another")
        return
    try:
        if not _is_ours(staging):
            raise StoreError(
                errno.EEXIST,
                f"a save to {path} needs the name {staging}, where something else is; move it away",
            )
        log.info("%s: removed what a killed save left", staging)
        shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def _is_ours(directory: Path) -> bool:
    """Tell whether there is nothing in a directory but what a checkpoint, whole or not, has."""
    names = [entry.name for entry in directory.iterdir()]
    return all(name == MANIFEST or _RANK.fullmatch(name) for name in names)


def _replaced(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def _lock(directory: Path) -> int | None:
    """Return a descriptor that locks the directory of this name; None if another one does."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, directory):
            return fd
    os.close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _place(file: FrozenFile, target: Path) -> None:
    """Give a frozen file a name, as a link or as a copy, and make it durable."""
    try:
        link(file.fd, target)
        os.fsync(file.fd)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise StoreError(error.errno, f"cannot link {target}: {error.strerror}") from error
        _copy(file, target)


def _copy(file: FrozenFile, target: Path) -> None:
    source = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    readable = FrozenFile(source, file.name, file.header_bytes, file.data_bytes, file.digests)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, file.file_bytes)
        _write_all(fd, memoryview(os.pread(source, file.header_bytes, 0)), 0)
        for offset, piece in _pieces(readable, memoryview(bytearray(PIECE_BYTES))):
            check_digest(piece, file.digests[offset], file.name, file.header_bytes + offset)
            _write_all(fd, piece, file.header_bytes + offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        kind = OutOfSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(
            error.errno,
            f"cannot copy {format_bytes(file.file_bytes)} to {target}: {error.strerror}",
        ) from error
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwritev(fd, [data], position)
        data, position = data[count:], position + count


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, memoryview(data), 0)
        os.fsync(fd)
    except OSError as error:
        raise StoreError(error.errno, f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _commit(staging: Path, path: Path) -> None:
    """Give the whole directory its name; an older one under that name goes afterwards."""
    replaced = _replaced(path)
    exchanged = False
    if not os.path.lexists(path):
        staging.rename(path)
    elif _exchange(staging, path):
        exchanged = True
    else:
        _remove(replaced)
        path.rename(replaced)
        staging.rename(path)
    _sync(path.parent)
    _remove(replaced)
    if exchanged:
        _remove(staging)


def _remove(replaced: Path) -> None:
    """Remove a checkpoint that was replaced; another save may be doing that, or use its name."""
    if replaced.is_symlink():
        replaced.unlink()
        return
    lock = _lock(replaced)
    if lock is None:
        return
    if _is_ours(replaced):
        shutil.rmtree(replaced, ignore_errors=True)
    if _is_at(lock, replaced):
        log.warning("%s, which was replaced, could not be removed", replaced)
    os.close(lock)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the filesystem cannot."""
    names = os.fsencode(one), os.fsencode(other)
    result = _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise StoreError(number, f"cannot put {one} in place of {other}: {os.strerror(number)}")
