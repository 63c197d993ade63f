"""Moving windows between host buffers and the store: piece by piece, on a few threads a drive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from optstream.errors import WindowIOError
from optstream.store.base import PIECE_BYTES, Store
from optstream.stream import lane as lanes

Move = Callable[[int, int, memoryview], None]
"""`Store.read` or `Store.write`."""

Done = Callable[[Exception | None], None]
"""Told of the first piece's error that was met, or of none."""


@dataclass
class Counters:
    """What was measured since the stream was made; bytes count when their transfer is through."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0


class Transfers:
    """Moves whole windows.

    Ordering: `read` and `write` are called with `changed` held. So are `done`, once the last piece
    is through, and `then` behind it, where a thread of a drive ended the transfer.
    """

    def __init__(
        self,
        store: Store,
        io_threads: int,
        changed: threading.Condition,
        then: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self._store = store
        self._io_threads = io_threads
        self._changed = changed
        self._then = then
        self._pools: list[ThreadPoolExecutor] = []

    def open(self, num_drives: int) -> None:
        """Make threads for so many drives; a thread starts when it is first needed."""
        for drive in range(len(self._pools), num_drives):
            self._pools.append(ThreadPoolExecutor(self._io_threads, f"optstream-drive{drive}"))

    def read(self, window: int, memory: memoryview, done: Done) -> None:
        """Start reading a window into `memory`, which is as long as its data."""

        def count(error: Exception | None) -> None:
            self.counters.read_bytes += 0 if error else len(memory)
            done(error)

        self._start(window, memory, self._store.read, lanes.nothing, count)

    def write(self, window: int, memory: memoryview, ready: lanes.Wait, done: Done) -> None:
        """Start writing a window from `memory` once `ready` returns."""

        def count(error: Exception | None) -> None:
            self.counters.written_bytes += 0 if error else len(memory)
            done(error)

        self._start(window, memory, self._store.write, ready, count)

    def close(self) -> None:
        """End the threads, with what they were given."""
        for pool in self._pools:
            pool.shutdown(wait=True)
        self._pools = []

    def _start(
        self, window: int, memory: memoryview, move: Move, ready: lanes.Wait, done: Done
    ) -> None:
        offsets = range(0, len(memory), PIECE_BYTES)
        if not offsets:
            done(None)
            return
        errors: list[Exception] = []
        left = len(offsets)

        def end_piece() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done(errors[0] if errors else None)
                self._changed.notify_all()

        def move_piece(offset: int) -> None:
            try:
                ready()
                move(window, offset, memory[offset : offset + PIECE_BYTES])
            except Exception as error:  # whatever it is, the thread that steps must hear it
                errors.append(_of_window(error, window))
            with self._changed:
                end_piece()
                if left == 0:
                    self._then()

        pool = self._pools[self._store.drive(window)]
        for offset in offsets:
            try:
                pool.submit(move_piece, offset)
            except RuntimeError as error:  # the interpreter is ending, or may have no more threads
                errors.append(error)
                end_piece()


def _of_window(error: Exception, window: int) -> Exception:
    if isinstance(error, WindowIOError):
        error.window = window
    return error
