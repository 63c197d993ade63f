"""Windows in this process's memory: no transfers, for comparison and for hosts with room.

With an accelerator the windows are pinned where they are (stream/lane.py), so at their exact size.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence

from optstream.errors import ClosedError, OutOfSpaceError
from optstream.memory import read_available_bytes
from optstream.store.base import FrozenFile, Store, WindowFile, freeze_copy
from optstream.store.pages import map_private
from optstream.units import format_bytes


class Memory(Store):
    """One private anonymous mapping a window, zero and unbacked until it is touched."""

    in_place = True

    def __init__(self) -> None:
        # never mmap.close(): it unmaps under tensors that still lie there; dropping the last
        # reference unmaps just as well
        self._windows: list[memoryview] | None = []
        self._specs: list[WindowFile] = []
        self._process = os.getpid()

    def reserve(self, files: Sequence[WindowFile]) -> None:
        windows = self._open_windows()
        needed_bytes = sum(file.data_bytes for file in files)
        available_bytes = read_available_bytes()
        if needed_bytes > available_bytes:
            raise _too_large(needed_bytes, available_bytes)
        try:
            windows += [map_private(file.data_bytes) for file in files]
            self._specs += files
        except OSError as error:
            raise _too_large(needed_bytes, available_bytes) from error

    def read(self, window: int, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.view(window)[offset : offset + len(buffer)]

    def write(self, window: int, offset: int, buffer: memoryview) -> None:
        self.view(window)[offset : offset + len(buffer)] = buffer

    def freeze(self, windows: Iterable[int], *, room: bool = True) -> dict[int, FrozenFile]:
        """Copy the windows: memory that is updated in place has no other immutable form."""
        windows = list(windows)
        needed_bytes = sum(self._specs[window].file_bytes for window in windows)
        available_bytes = read_available_bytes()
        if needed_bytes > available_bytes:
            raise _too_large(needed_bytes, available_bytes)
        return {
            window: freeze_copy(self._specs[window], self.view(window), f"copy of window {window}")
            for window in windows
        }

    def file(self, window: int) -> WindowFile:
        return self._specs[window]

    def prepare_write(self, window: int) -> None:
        return None

    def view(self, window: int) -> memoryview:
        assert window >= 0, window
        return self._open_windows()[window]

    def close(self) -> None:
        self._windows = None

    def _open_windows(self) -> list[memoryview]:
        if self._process != os.getpid():
            raise ClosedError(
                "the state belongs to the parent process; a forked child cannot use it"
            )
        if self._windows is None:
            raise ClosedError("the store was closed and its memory given back")
        return self._windows


def _too_large(needed_bytes: int, available_bytes: int) -> OutOfSpaceError:
    return OutOfSpaceError(
        errno.ENOMEM,
        f"state needs {format_bytes(needed_bytes)} of memory, {format_bytes(available_bytes)} is "
        'left to this process; use store="direct" with a directory on a drive',
    )
