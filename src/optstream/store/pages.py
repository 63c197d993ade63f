"""Memory that is mapped: private and shared, and what the kernel does with the pages of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_MAP_FAILED = ctypes.c_void_p(-1).value
# Source: include/uapi/asm-generic/mman-common.h
_MS_SYNC = 4
_SYS_CACHESTAT = 451  # the same on every processor, as of all calls since 2019
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


def map_private(num_bytes: int) -> memoryview:
    """Return page-aligned zeros, in memory once they are touched; given back with the last view.

    Not torch's: `pin_memory` may round up to a power of two, and `empty` is aligned to 64 bytes.
    """
    # without flags Python maps shared memory, which counts as shmem
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # a data loader forks: its copy would make this process copy each page that it updates, and
    # before Linux 6.3 pages under direct I/O could end up in the child (open(2), NOTES)
    memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)[:num_bytes]


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """Map the start of a file, writable; unmapped when the last view of it is gone.

    Not `mmap.mmap`: that holds a descriptor more for each mapping.

    Raises:
        OSError: the filesystem or a limit of this process does not allow it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise _last_error()
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # whatever still runs while the interpreter ends may look at a tensor
    weakref.finalize(memory, _unmap, address, num_bytes, os.getpid()).atexit = False
    # a data loader's worker must not hold the file's space when the parent ends
    _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK)
    return memoryview(memory).cast("B")


def _unmap(address: int, num_bytes: int, owner: int) -> None:
    # a forked child has not inherited it and may have something else there
    if os.getpid() == owner:
        _libc.munmap(address, num_bytes)


def sync_mapping(view: memoryview) -> None:
    """Write what was changed through a mapping to its file, and wait for it.

    Args:
        view: of a mapping, page-aligned.

    Raises:
        OSError: the drive or its filesystem failed.
    """
    if _libc.msync(address_of(view), len(view), _MS_SYNC) != 0:
        raise _last_error()


def populate(view: memoryview, *, writable: bool) -> None:
    """Bring all pages of a mapping in, so that touching them faults no more.

    A kernel before 5.14 does nothing here: the pages come in when they are touched.

    Raises:
        OSError: EFAULT where touching a page would be a SIGBUS, EHWPOISON, ENOMEM.
    """
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    while _libc.madvise(address_of(view), len(view), advice) != 0:
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            return
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))


def count_missing_bytes(fd: int, num_bytes: int) -> int:
    """Return how much of the start of a file is not in the page cache, in bytes."""
    if num_bytes == 0:
        return 0
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    where, found = (ctypes.c_uint64 * 2)(0, num_bytes), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_SYS_CACHESTAT, fd, where, found, 0) == 0:
        return max(0, num_pages - found[0]) * mmap.PAGESIZE
    return (num_pages - _count_resident(fd, num_bytes, num_pages)) * mmap.PAGESIZE


def _count_resident(fd: int, num_bytes: int, num_pages: int) -> int:
    """Count what a kernel before 6.5 tells of a mapping only, and four times slower."""
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise _last_error()
    try:
        resident = (ctypes.c_ubyte * num_pages)()
        if _libc.mincore(address, num_bytes, resident) != 0:
            raise _last_error()
    finally:
        _libc.munmap(address, num_bytes)
    return bytes(resident).count(1)


def address_of(view: memoryview) -> int:
    """Return where a writable view's bytes are in memory."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
