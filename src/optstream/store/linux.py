"""System calls that Python does not offer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

# Source: include/uapi/linux/{stat,fcntl,fs}.h
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_ALIGN_AT = 152
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_NOCOW_FL = 0x00800000
_FICLONE = 0x40049409


def fallocate(fd: int, num_bytes: int) -> None:
    """Reserve the first bytes of a file; they read as zeros.

    Not `os.posix_fallocate`: where the filesystem refuses, glibc emulates it by a small write in
    each block, which fails on an O_DIRECT descriptor and crawls on a network filesystem.

    Raises:
        OSError: EOPNOTSUPP where the filesystem cannot reserve.
    """
    while _libc.fallocate(fd, 0, 0, num_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def direct_align_bytes(fd: int) -> int | None:
    """Return the alignment of offset and memory that direct I/O on a file needs.

    0: the file cannot do direct I/O; None: the kernel (before 6.1) or the filesystem does not say.
    """
    result = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result)
    except AttributeError:
        return None  # a C library without statx
    (mask,) = struct.unpack_from("I", result, 0)
    if failed or not mask & _STATX_DIOALIGN:
        return None
    memory_align_bytes, offset_align_bytes = struct.unpack_from("II", result, _DIO_ALIGN_AT)
    return int(max(memory_align_bytes, offset_align_bytes))


def link(fd: int, target: Path) -> None:
    """Give an open file, also one without a name, a new name on its filesystem.

    Raises:
        OSError: the filesystem cannot, or all links that a nameless file once had are gone.
    """
    here = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # only with a directory descriptor does os.link follow the link in /proc
        os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=here, follow_symlinks=True)
    finally:
        os.close(here)


def share_blocks(source_fd: int, target_fd: int) -> bool:
    """Make an empty file a copy of another that shares its blocks (reflink); False: cannot."""
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError:
        return False
    return True


def overwrite_in_place(fd: int) -> None:
    """Ask a copy-on-write filesystem (btrfs) to overwrite this empty file's blocks in place.

    Otherwise reserved space does not serve a second write, and checksums turn direct writes into
    buffered ones. A filesystem that knows no such flag ignores or refuses it, which is as well.
    """
    try:
        flags = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
        (value,) = struct.unpack_from("I", flags)
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("II", value | _FS_NOCOW_FL, 0))
    except OSError:
        pass
