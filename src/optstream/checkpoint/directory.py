"""Checkpoints on a filesystem: where one may be made, and how one is opened and verified."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from optstream import durable
from optstream.checkpoint.inside import list_inside, open_inside, read_inside
from optstream.checkpoint.manifest import StoredWindow
from optstream.checkpoint.manifest_json import from_json
from optstream.checkpoint.placing import pieces
from optstream.checkpoint.snapshot import Snapshot
from optstream.checkpoint.staging import MANIFEST, find_foreign, replaced_path
from optstream.errors import CheckpointError, ConfigError, OutOfSpaceError, StoreError
from optstream.mounts import read_free_bytes
from optstream.store.base import FrozenFile
from optstream.store.live import check_digest
from optstream.units import format_bytes

log = logging.getLogger("optstream")


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return a given path as an absolute one.

    Raises:
        ConfigError: it is no path.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} is no path; give that of a directory")
    absolute = Path(text).absolute()
    if absolute.name in ("", ".."):
        raise ConfigError(f"{path} has no name of its own; give the path of a new directory")
    return absolute


def check_target(path: Path) -> None:
    """Refuse a path that a checkpoint cannot be saved to, before anything is done.

    Raises:
        StoreError: something else than a checkpoint is there, or it cannot be written.
    """
    foreign = ""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(replaced_path(path))  # the longest name that a save needs
        with contextlib.suppress(FileNotFoundError):
            foreign = find_foreign(path) or _unmarked(path)
    except NotADirectoryError:
        foreign = "a file"
    except OSError as error:
        raise durable.failed("save to", path, error) from error
    if foreign:
        raise StoreError(
            errno.EEXIST,
            f"{path} is there and is no checkpoint alone: it has {foreign}; choose another path, "
            "and keep other files beside a checkpoint, not in it",
        )
    parent = existing_parent(path)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(errno.EACCES, f"cannot save to {path}: {parent} is not writable")


def _unmarked(path: Path) -> str:
    names = list(list_inside(path))
    return f"{names[0]} but no {MANIFEST}" if names and MANIFEST not in names else ""


def existing_parent(path: Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def check_space(path: Path, needed_bytes: int) -> None:
    """Raise OutOfSpaceError unless the filesystem of `path` has this much room for copies."""
    free_bytes = read_free_bytes(existing_parent(path))
    if needed_bytes > free_bytes:
        raise OutOfSpaceError(
            errno.ENOSPC,
            f"a checkpoint in {path} needs copies of {format_bytes(needed_bytes)}, there are "
            f"{format_bytes(free_bytes)} free; free space, or save on the drive of the state",
        )


def open_checkpoint(path: Path) -> Snapshot:
    """Open a checkpoint; its structure is checked, its bytes are not read (see `verify`).

    All of it comes from one directory, also when another save takes its place meanwhile.

    Raises:
        CheckpointError: no checkpoint there, or a file is missing, truncated or another one.
        FormatError: the manifest is damaged or newer.
    """
    while True:
        present = _present(path)
        try:
            directory = os.open(present, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} is no checkpoint: {error.strerror}") from error
        try:
            return _read(directory, present)
        except CheckpointError:
            if _leads_to(present, directory):
                raise
            # it was replaced, and is being removed; the new one is whole
        finally:
            os.close(directory)


def _present(path: Path) -> Path:
    replaced = replaced_path(path)
    try:
        if path.exists() or not (replaced / MANIFEST).is_file():
            return path
    except OSError:
        return path  # to say so where it is opened
    log.warning("%s is gone, a save was killed while it replaced it; using %s", path, replaced)
    return replaced


def _leads_to(path: Path, directory: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(directory))
    return False


def _read(directory: int, path: Path) -> Snapshot:
    try:
        data = read_inside(directory, MANIFEST)
    except OSError as error:
        raise CheckpointError(
            f"{path} is no checkpoint: {MANIFEST} cannot be read ({error.strerror})"
        ) from error
    manifest = from_json(data, str(path / MANIFEST))
    files = {
        index: _open_window(directory, path, window)
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


def check_alone(snapshot: Snapshot) -> None:
    """Raise CheckpointError if a checkpoint has files that no save put there."""
    assert snapshot.directory is not None
    listed = {MANIFEST, *(window.file for window in snapshot.manifest.windows)}
    for name in list_inside(snapshot.directory):
        if name not in listed:
            raise CheckpointError(
                f"{snapshot.directory} has {name}, which is no part of it; move it away"
            )


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


def _open_window(directory: int, checkpoint: Path, window: StoredWindow) -> FrozenFile:
    path = checkpoint / window.file
    try:
        fd = open_inside(directory, window.file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    file = FrozenFile(fd, str(path), window.header_bytes, window.data_bytes, {})
    found = os.fstat(fd)
    if found.st_size != file.file_bytes:
        raise CheckpointError(
            f"{path} has {found.st_size} bytes, the manifest says {file.file_bytes}; truncated?"
        )
    return file
