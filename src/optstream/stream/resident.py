"""Resident windows: each has a buffer of its own, read when first needed, written by saves alone.

FREE ──► READING ──► READY ◄──► BUSY
                       ▲ │ newer, and saved
                       │ ▼
                     WRITING ──► DIRTY: the drive refused it; used and saved like READY
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator

from torch import Tensor

from optstream.errors import OutOfSpaceError
from optstream.memory import read_available_bytes
from optstream.plan import Plan
from optstream.store.base import Store
from optstream.stream.lane import Wait
from optstream.stream.slots import Slot, SlotState, allocate_memory, view
from optstream.stream.transfers import Transfers
from optstream.units import format_bytes


class Resident:
    """The slots of resident windows, which no other window takes; one thread calls.

    Attributes:
        hosts: all their memory, in few pieces: many small ones would take long to pin.
    """

    def __init__(self, store: Store, transfers: Transfers, changed: threading.Condition) -> None:
        self.hosts: list[Tensor] = []
        self._slots: dict[int, Slot] = {}
        self._store = store
        self._transfers = transfers
        self._changed = changed

    def __contains__(self, window: int) -> bool:
        return window in self._slots

    def make_room(self, plan: Plan) -> memoryview:
        """Return memory for those windows of a larger plan that are not resident yet.

        Raises:
            OutOfSpaceError: there is not so much.
        """
        num_bytes = sum(plan.windows[window].data_bytes for window in self._new(plan))
        if self._store.in_place or num_bytes == 0:
            return memoryview(b"")
        try:
            return allocate_memory(num_bytes)
        except OSError as error:
            raise OutOfSpaceError(
                errno.ENOMEM,
                f"resident windows need {format_bytes(num_bytes)} of memory, "
                f"{format_bytes(read_available_bytes())} is left to this process; give a smaller "
                "ram",
            ) from error

    def extend(self, plan: Plan, room: memoryview) -> None:
        """Give the new resident windows their slots, in `room` or where an in-place store has them.

        Args:
            room: from `make_room`.
        """
        new = self._new(plan)
        if self._store.in_place:
            slots = [view(self._store.view(window)) for window in new]
            self.hosts += [slot.tensor for slot in slots]
        else:
            slots = list(_cut(room, [plan.windows[window].data_bytes for window in new]))
            self.hosts += [view(room).tensor]
        self._slots |= dict(zip(new, slots, strict=True))

    def acquire(self, window: int) -> Slot:
        """Return a window's slot, BUSY, once its bytes are there.

        Raises:
            WindowReadError: they were on the drive and cannot be read.
        """
        slot = self._slots[window]
        with self._changed:
            self._wait_written(slot)
            if slot.window is None:
                start = time.perf_counter()
                self._transfers.read(slot, window)
                self._transfers.wait(slot)
                self._transfers.counters.read_wait_s += time.perf_counter() - start
            if slot.window is None:
                raise self._transfers.read_errors.pop(window)
            slot.state = SlotState.BUSY
        slot.ready()
        if window not in self._transfers.stored:
            slot.tensor.zero_()
        return slot

    def _wait_written(self, slot: Slot) -> None:
        """Wait for the write of a save, which reads the buffer."""
        start = time.perf_counter()
        self._transfers.wait(slot)
        self._transfers.counters.write_wait_s += time.perf_counter() - start

    def give_back(self, slot: Slot, window: int, ready: Wait) -> None:
        """Keep what a window was updated to; `ready` blocks until it is in the slot."""
        with self._changed:
            self._transfers.stored.add(window)
            slot.ready, slot.newer, slot.state = ready, True, SlotState.READY

    def abandon(self) -> None:
        """Drop an update that did not end, where the drive has the bytes from before."""
        with self._changed:
            for slot in self._slots.values():
                if slot.state is SlotState.BUSY and slot.newer:
                    slot.state = SlotState.READY
                elif slot.state is SlotState.BUSY:
                    slot.put(SlotState.FREE, None)

    def forget(self) -> None:
        """Hold nothing: other bytes are the state now."""
        with self._changed:
            self._transfers.settle()
        for slot in self._slots.values():
            slot.ready()
            slot.put(SlotState.FREE, None)
            slot.newer = False

    def holding(self, window: int) -> Slot | None:
        """Return a window's slot if its bytes are there and may be read."""
        slot = self._slots.get(window)
        if slot is None or slot.window is None:
            return None
        slot.ready()
        return slot

    def save(self) -> dict[int, Exception]:
        """Start writing the windows whose bytes the drive has not got; `changed` is held.

        What cannot be written stays as it is, and is tried again by the next save.

        Returns:
            Why a write could not even be started, by window.
        """
        if self._store.in_place:
            for slot in self._slots.values():
                slot.ready()
            return {}
        errors: dict[int, Exception] = {}
        for window, slot in self._slots.items():
            self._transfers.wait(slot)  # of a save before
            if slot.newer:
                self._transfers.write(slot, window, errors)
        return dict(errors)

    def close(self) -> None:
        """Give the memory back."""
        self._slots, self.hosts = {}, []

    def _new(self, plan: Plan) -> list[int]:
        return sorted(plan.resident - self._slots.keys())


def _cut(memory: memoryview, sizes: list[int]) -> Iterator[Slot]:
    """Yield slots of these sizes, one behind the other."""
    for num_bytes in sizes:
        yield view(memory[:num_bytes])
        memory = memory[num_bytes:]
