"""The contract of a store: where windows live between two uses.

A store knows windows as numbered byte ranges; what the bytes mean is the plan's business, and when
they move is the stream's. All methods are synchronous and may be called from several threads at
once for different byte ranges; a store starts no thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096


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


class Store(ABC):
    """Holds windows; `window` is always an index in the order of `reserve`."""

    in_place: bool = False
    """True: the state is updated where `view` shows it, so there are no slots and no transfers."""

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

    def view(self, window: int) -> memoryview:
        """Return the window's data itself (where `in_place`), writable, valid until `close`."""
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
