"""Files as one uses them by hand: ordinary calls, one thread, one window after another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ZEROS = bytes(8 * 2**20)


class BufferedFiles:
    """One file a window, read and written through the page cache, which is dropped at once.

    Otherwise the page cache would hold the state, and a comparison with it would be one with RAM.
    """

    def __init__(self, directory: str, sizes: Sequence[int]) -> None:
        """Write files of these sizes (bytes), in a new folder in the directory."""
        self._closing = contextlib.ExitStack()
        folder = Path(
            self._closing.enter_context(
                tempfile.TemporaryDirectory(prefix="buffered-", dir=directory)
            )
        )
        self._files = []
        for index, num_bytes in enumerate(sizes):
            # written, since what is only reserved would be read without the drive
            path = folder / f"{index:05d}"
            file = self._closing.enter_context(path.open("w+b", buffering=0))
            self._files.append(file)
            for start in range(0, num_bytes, len(_ZEROS)):
                file.write(_ZEROS[: num_bytes - start])
            self._settle(index)

    def read(self, index: int, buffer: memoryview) -> None:
        """Fill the buffer with all of a window's file."""
        self._files[index].seek(0)
        assert self._files[index].readinto(buffer) == len(buffer)

    def write(self, index: int, buffer: memoryview) -> None:
        """Write all of a window's file; it is on the drive, and in no memory, when this returns."""
        self._files[index].seek(0)
        assert self._files[index].write(buffer) == len(buffer)
        self._settle(index)

    def _settle(self, index: int) -> None:
        fd = self._files[index].fileno()
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Remove the files."""
        self._closing.close()
