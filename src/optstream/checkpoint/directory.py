"""Checkpoints on a filesystem: a directory that is there whole, or not at all.

    PATH.tmp/                  made and locked by the save; unlocked: a dead run's, removed
      rank00000/window00000.safetensors ...   links to the frozen files, or copies (`placing`)
      manifest.json            last, when all files are durable
    PATH.tmp -> PATH           in one step (`staging`)

Ordering: files, then their directory, then the manifest, then the rename, then the parent are made
durable.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

from optstream import durable
from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.placing import pieces, place
from optstream.checkpoint.snapshot import Snapshot
from optstream.checkpoint.staging import MANIFEST, commit, replaced_path, staged
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
    with staged(path) as staging:
        for window, file in snapshot.files.items():
            target = staging / snapshot.manifest.windows[window].file
            if not target.parent.is_dir():
                target.parent.mkdir(mode=0o700)
            place(file, target)
        for folder in {(staging / window.file).parent for window in snapshot.manifest.windows}:
            if folder.is_dir():
                durable.sync(folder)
        durable.write_file(staging / MANIFEST, manifest)
        durable.sync(staging)
        commit(staging, path)


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


def verify(snapshot: Snapshot) -> None:
    """Read every byte and hold it against its digest.

    Raises:
        WindowReadError: the first piece that is not what was written, or cannot be read.
    """
    buffer = memoryview(bytearray(snapshot.manifest.piece_bytes))
    for file in snapshot.files.values():
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
