"""Frozen files under names in a checkpoint: links, or copies where no link can be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from optstream import durable
from optstream.errors import WindowReadError
from optstream.store.base import PIECE_BYTES, FrozenFile
from optstream.store.live import check_digest
from optstream.units import format_bytes

_CANNOT_LINK = (
    errno.EXDEV,
    errno.ENOENT,  # a nameless file whose links are all gone
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
)


def place(files: Mapping[Path, FrozenFile]) -> None:
    """Give frozen files names, as links or as copies, and make them durable."""
    linked = {target: file for target, file in files.items() if _link(file, target)}
    # behind all links: the journal of the filesystem takes them together
    for target, file in linked.items():
        try:
            os.fsync(file.fd)
        except OSError as error:
            raise durable.failed("make durable", target, error) from error
    for target, file in files.items():
        if target not in linked:
            _copy(file, target)


def _link(file: FrozenFile, target: Path) -> bool:
    """Tell whether a frozen file has the name as well now; False where no link can be."""
    try:
        file.link(target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise durable.failed("link", target, error) from error
        return False
    return True


def _copy(file: FrozenFile, target: Path) -> None:
    source = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
    readable = FrozenFile(source, file.name, file.header_bytes, file.data_bytes, file.digests)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, file.file_bytes)
        durable.write_all(fd, memoryview(os.pread(source, file.header_bytes, 0)), 0)
        for offset, piece in pieces(readable, memoryview(bytearray(PIECE_BYTES))):
            check_digest(piece, file.digests[offset], file.name, file.header_bytes + offset)
            durable.write_all(fd, piece, file.header_bytes + offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        verb = f"copy {format_bytes(file.file_bytes)} to"
        raise durable.failed(verb, target, error) from error
    finally:
        os.close(fd)


def pieces(file: FrozenFile, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
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
