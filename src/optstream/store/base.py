"""The contract of a store: where windows live between two uses.

A store knows windows as numbered byte ranges; what the bytes mean is the plan's business, and when
they move is the stream's. All methods are synchronous and may be called from several threads at
once for different byte ranges; a store starts no thread.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from optstream.store import linux

PIECE_BYTES = 8 * 2**20
"""Of one transfer, and of what one digest covers; 4 to 16 MiB reach the drive's limit with 2 to 4
threads (benchmarks/step.py)."""


@dataclass(frozen=True)
class WindowFile:
    """What a store must hold for one window.

    Attributes:
        header: the safetensors header, padded to a multiple of PAGE_BYTES; written when reserved.
        data_bytes: size of the data behind it, a multiple of PAGE_BYTES.
    """

    header: bytes
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes


@dataclass
class Sharing:
    """Who may see a file beside this process.

    Attributes:
        linked: it has, or had, a name in a checkpoint; whoever opened that still reads the file
            when the name is gone.
    """

    linked: bool = False


class FrozenFile:
    """A window's file that is never written again; its descriptor closes with the object.

    Attributes:
        fd: of the whole file, header included.
        name: the file in words, for errors.
        digests: xxh3 (64 bit) by offset in the data, of each PIECE_BYTES; the header's at
            -header_bytes. Those of a write that is still under way come when it is through.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        header_bytes: int,
        data_bytes: int,
        digests: dict[int, int],
        sharing: Sharing | None = None,
    ) -> None:
        self.fd = fd
        self._sharing = sharing or Sharing()
        self.name = name
        self.header_bytes = header_bytes
        self.data_bytes = data_bytes
        self.digests = digests
        self.close = weakref.finalize(self, os.close, fd)
        _frozen_files.add(self)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    def link(self, target: Path) -> None:
        """Give the file a name on its filesystem.

        Raises:
            OSError: it cannot have one, see `linux.link`.
        """
        self._sharing.linked = True
        linux.link(self.fd, target)

    def ordered_digests(self) -> tuple[int, ...]:
        """Return the header's digest, then those of the data's pieces in order."""
        pieces = range(0, self.data_bytes, PIECE_BYTES)
        return tuple(self.digests[offset] for offset in (-self.header_bytes, *pieces))


def _close_in_child() -> None:
    """Close a forked child's copies, so that a data loader's worker holds no space on the drive."""
    for file in list(_frozen_files):
        file.close()


_frozen_files: weakref.WeakSet[FrozenFile] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def freeze_copy(file: WindowFile, data: memoryview, name: str) -> FrozenFile:
    """Return a copy of a window's data as a file in memory, which has no drive to fail."""
    fd = os.memfd_create("optstream-frozen", os.MFD_CLOEXEC)
    digests = {-len(file.header): xxhash.xxh3_64_intdigest(file.header)}
    for offset in range(0, len(data), PIECE_BYTES):
        digests[offset] = xxhash.xxh3_64_intdigest(data[offset : offset + PIECE_BYTES])
    frozen = FrozenFile(fd, name, len(file.header), len(data), digests)
    with open(fd, "wb", closefd=False) as copy:
        copy.write(file.header)
        copy.write(data)
    return frozen


class Store(ABC):
    """Holds windows; `window` is always an index in the order of `reserve`."""

    in_place: bool = False
    """True: the state is updated where `view` shows it, so there are no slots and no transfers."""

    cached: bool = False
    """True: the state is updated where `view` shows it, in pages of a file, which the kernel may
    write back and reclaim; `prepare_write` and `bring_in` come before, `write_back` behind."""

    @property
    def folder(self) -> Path:
        """Where other files beside the state may be made for a while."""
        return Path(tempfile.gettempdir())

    @abstractmethod
    def reserve(self, files: Sequence[WindowFile]) -> None:
        """Make room for more windows, after those already reserved, and write their headers.

        All or nothing: on an error no window was added and nothing is left on the drive.

        Raises:
            OutOfSpaceError: with needed and free bytes, before anything was written where possible.
            StoreError: any other refusal, with the path.
        """

    @abstractmethod
    def read(self, window: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the window's data from `offset`; whole, or an error.

        Args:
            window: index of the window.
            offset: bytes from the start of the data (behind the header), a multiple of PAGE_BYTES.
            buffer: page-aligned, a multiple of PAGE_BYTES long.

        Raises:
            WindowReadError: with file, offset, bytes and errno.
        """

    @abstractmethod
    def write(self, window: int, offset: int, buffer: memoryview) -> None:
        """Store `buffer` at `offset` of the window's data; whole, or an error, as in `read`.

        Raises:
            WindowWriteError: with file, offset, bytes and errno; `buffer` is untouched.
        """

    @abstractmethod
    def file(self, window: int) -> WindowFile:
        """Return what `reserve` was given for a window."""

    def device(self, window: int) -> int | None:
        """Return the `st_dev` of the filesystem that holds the window's file; None for memory."""
        return None

    @abstractmethod
    def freeze(self, windows: Iterable[int], *, room: bool = True) -> dict[int, FrozenFile]:
        """Make what these windows hold now immutable; the next write of each goes elsewhere.

        Ordering: writes of these windows that are under way belong to what they hold, and the files
        are whole when those are through; where `cached` none is. All or nothing: space for the next
        writes is reserved first. A drive that refuses that for another reason than space is
        asked again by `prepare_write`: what it still holds can be saved to another one.

        Args:
            room: False reserves nothing: nobody holds what is frozen by the time of the next write.

        Raises:
            OutOfSpaceError: with needed and free bytes; nothing was frozen.
        """

    @abstractmethod
    def prepare_write(self, window: int) -> None:
        """Be told that all of a window is about to be written; a frozen one gets its fresh file.

        Where `cached` it comes before `view`, and the fresh file is a copy.

        Raises:
            WindowWriteError: there is none, and the drive refuses one.
        """

    def adopt(self, files: Mapping[int, FrozenFile]) -> bool:
        """Take the files of a checkpoint as what these windows hold, frozen.

        No bytes move; digests are checked when pieces are first read.

        Returns:
            False, with nothing changed, where that cannot be: another filesystem, another layout.
        """
        return False

    def bring_in(self, window: int) -> int:
        """Bring all of a window into memory, so that an update does not wait for the drive.

        Ordering: after `prepare_write`.

        Returns:
            Bytes that were not in memory.

        Raises:
            WindowReadError: with file, offset, bytes and errno.
        """
        return 0

    def write_back(self, window: int) -> int:
        """Write all of a window to the drive, so that the kernel can reclaim its pages at once.

        Ordering: no update of the window is under way.

        Returns:
            Bytes that were written.

        Raises:
            WindowWriteError: with file, offset, bytes and errno; the bytes are still in memory.
        """
        return 0

    def view(self, window: int) -> memoryview:
        """Return the window's data itself (where `in_place` or `cached`), writable.

        It stays valid while anybody holds it; it is the window until the next `freeze` or `adopt`.
        """
        raise AssertionError(f"{type(self).__name__} has no windows in place")

    @property
    def num_drives(self) -> int:
        """Number of places that transfer independently of each other; each gets its own threads."""
        return 1

    def drive(self, window: int) -> int:
        """Return which of `num_drives` holds the window."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give back everything; nothing is left on the drive. May be called twice."""
