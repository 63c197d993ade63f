"""Moving windows between slots and the store: piece by piece, on a few threads a drive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from optstream.errors import WindowIOError
from optstream.store.base import PIECE_BYTES, Store
from optstream.stream import frozen
from optstream.stream import lane as lanes
from optstream.stream.slots import Slot, SlotState


@dataclass
class Counters:
    """What was measured since the stream was made; bytes count when their transfer is through.

    Attributes:
        saved_bytes: those of written_bytes that were of resident windows.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    saved_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0


class Transfers:
    """Starts transfers of whole windows, and says in their slots what became of them.

    Attributes:
        stored: windows that have state; the others are new and read as zeros.
        read_errors: by window.
        then: see below.
        num_reading: windows that are being read.

    Ordering: transfers are started with `changed` held. So are they ended, and `then` is called
    behind that, with it held, unless the caller's own thread ended it.
    """

    def __init__(
        self,
        store: Store,
        io_threads: int,
        changed: threading.Condition,
    ) -> None:
        self.counters = Counters()
        self.stored: set[int] = set()
        self.read_errors: dict[int, Exception] = {}
        self.num_reading = 0
        self._writing: set[int] = set()
        self._awaited: dict[int, frozen.Written] = {}
        self._store = store
        self._io_threads = io_threads
        self._changed = changed
        self.then: Callable[[], None] = lanes.nothing
        self._num_writes = 0
        self._pools: list[ThreadPoolExecutor] = []

    def open(self, num_drives: int) -> None:
        """Make threads for so many drives; a thread starts when it is first needed."""
        for drive in range(len(self._pools), num_drives):
            self._pools.append(ThreadPoolExecutor(self._io_threads, f"optstream-drive{drive}"))

    @property
    def idle(self) -> bool:
        return not (self.num_reading or self._writing)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        self._changed.wait_for(lambda: self.idle)

    def wait(self, slot: Slot) -> None:
        """Wait until a slot is not under way."""
        moving = (SlotState.READING, SlotState.WRITING)
        self._changed.wait_for(lambda: slot.state not in moving)

    def read(self, slot: Slot, window: int) -> None:
        """Start reading a window: READING, then READY or, upon an error, FREE.

        A new one is READY at once, and still to be zeroed.
        """
        if window not in self.stored:
            slot.put(SlotState.READY, window)
            return
        data = self._data(slot, window)

        def done(error: Exception | None) -> None:
            self.num_reading -= 1
            if error is None:
                self.counters.read_bytes += len(data)
                slot.state = SlotState.READY
            else:
                self.read_errors[window] = error
                slot.put(SlotState.FREE, None)

        slot.put(SlotState.READING, window)
        self.num_reading += 1
        self._start(window, data, self._store.read, lanes.nothing, done)

    def write(self, slot: Slot, window: int, errors: dict[int, Exception]) -> None:
        """Start writing a window: WRITING, then READY or, upon an error, DIRTY.

        Args:
            errors: gets the error.
        """
        data = self._data(slot, window)

        def done(error: Exception | None) -> None:
            self._writing.remove(window)
            if window in self._awaited:
                file = self._store.file(window)
                frozen.end(self._awaited.pop(window), file, window, data, error)
            if error is None:
                self.counters.written_bytes += len(data)
                self.counters.saved_bytes += len(data) if slot.newer else 0
                slot.newer = False
                slot.state = SlotState.READY
            else:
                errors[window] = error
                slot.state = SlotState.DIRTY

        self._num_writes += 1
        slot.used = self._num_writes
        self.stored.add(window)
        try:
            self._store.prepare_write(window)
        except Exception as error:  # no fresh file: the slot has the only copy
            errors[window] = _of_window(error, window)
            slot.state = SlotState.DIRTY
            return
        slot.state = SlotState.WRITING
        self._writing.add(window)
        self._start(window, data, self._store.write, slot.ready, done)

    def under_way(self) -> Mapping[int, frozen.Written]:
        """Return the end of each write that is under way, by window."""
        return {window: self._awaited.setdefault(window, Future()) for window in self._writing}

    def close(self) -> None:
        """End the threads, with what they were given."""
        for pool in self._pools:
            pool.shutdown(wait=True)
        self._pools = []

    def _data(self, slot: Slot, window: int) -> memoryview:
        return slot.memory[: self._store.file(window).data_bytes]

    def _start(
        self,
        window: int,
        data: memoryview,
        move: Callable[[int, int, memoryview], None],
        ready: lanes.Wait,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Move each piece once `ready` returns; the last one calls `done` with an error, if any."""
        offsets = range(0, len(data), PIECE_BYTES)
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
                move(window, offset, data[offset : offset + PIECE_BYTES])
            except Exception as error:  # whatever it is, the thread that steps must hear it
                errors.append(_of_window(error, window))
            with self._changed:
                end_piece()
                if left == 0:
                    self.then()

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
