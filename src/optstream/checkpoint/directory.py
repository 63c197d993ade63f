"""Checkpoints on a filesystem: where one may be made, and how one is opened and verified."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.placing import pieces
from optstream.checkpoint.snapshot import Snapshot
from optstream.checkpoint.staging import MANIFEST, replaced_path
from optstream.errors import CheckpointError, OutOfSpaceError, StoreError
from optstream.store.base import FrozenFile
from optstream.store.live import check_digest
from optstream.units import format_bytes

log = logging.getLogger("optstream")


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


def open_checkpoint(path: Path) -> Snapshot:
    """Open a checkpoint; its structure is checked, its bytes are not read (see `verify`).

    Raises:
        CheckpointError: no checkpoint there, or a file is missing, truncated or another one.
        FormatError: the manifest is damaged or newer.
    """
    replaced = replaced_path(path)
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


def verify(snapshot: Snapshot, windows: Iterable[int] | None = None) -> None:
    """Read every byte and hold it against its digest.

    Args:
        windows: only these.

    Raises:
        WindowReadError: the first piece that is not what was written, or cannot be read.
    """
    buffer = memoryview(bytearray(snapshot.manifest.piece_bytes))
    chosen = snapshot.files.keys() if windows is None else snapshot.files.keys() & set(windows)
    for window in sorted(chosen):
        file = snapshot.files[window]
        for offset, piece in pieces(file, buffer):
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
