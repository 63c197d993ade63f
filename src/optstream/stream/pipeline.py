"""Windows through slots: read ahead into those that may be taken, written behind the update.

`_pump` starts reads into every slot that may be taken, whenever something changes: when the scan
moves on and when a transfer is through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from optstream.plan import Plan
from optstream.store.base import Store
from optstream.stream.lane import Wait
from optstream.stream.mover import Mover
from optstream.stream.slots import Slot, SlotState, allocate, choose, holding
from optstream.stream.transfers import Transfers


class Pipeline(Mover):
    """A few slots that windows take in turn.

    All state below is guarded by `changed`.
    """

    def __init__(self, store: Store, transfers: Transfers, changed: threading.Condition) -> None:
        self._store = store
        self._transfers = transfers
        self._changed = changed
        self._slots: list[Slot] = []
        self._size = (0, 0)
        self._next_use: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}
        transfers.then = self._pump

    def resize(self, plan: Plan, unpin: Wait) -> None:
        size = (plan.slot_bytes, plan.num_slots)
        if size != self._size:
            unpin()
            self.free()  # before there are others: both would pass the bound
            self._slots = [allocate(plan.slot_bytes) for _ in range(plan.num_slots)]
            self.hosts = [slot.tensor for slot in self._slots]
            self._size = size

    def look_ahead(self, order: Sequence[int]) -> None:
        with self._changed:
            self._next_use = {window: position for position, window in enumerate(order)}
            self._transfers.read_errors.clear()
            self._pump()

    def take(self, window: int) -> Slot:
        with self._changed:
            while True:
                self._pump()
                slot = holding(self._slots, window)
                if slot is not None and slot.state is SlotState.READY:
                    break
                if slot is not None and slot.state is SlotState.DIRTY:
                    # an update that fails would spoil the only copy; the next step writes it first
                    raise self._errors[window]
                if window in self._transfers.read_errors:
                    raise self._transfers.read_errors.pop(window)
                if slot is None and self._transfers.idle:
                    raise next(iter(self._errors.values()))
                self._wait(reading=slot is not None and slot.state is SlotState.READING)
            slot.state = SlotState.BUSY
            self._next_use.pop(window, None)
        return slot

    def give_back(self, slot: Slot, window: int, ready: Wait) -> None:
        with self._changed:
            slot.ready = ready
            self._transfers.write(slot, window, self._errors)

    def drop(self) -> None:
        with self._changed:
            self._next_use = {}
            for slot in self._slots:
                if slot.state is SlotState.BUSY:
                    slot.put(SlotState.FREE, None)
            # a read that is about to fail belongs to this attempt, not to the next one
            self._changed.wait_for(lambda: not self._transfers.num_reading)

    def holding(self, window: int) -> Slot | None:
        slot = holding(self._slots, window)
        if slot is not None:
            slot.ready()
        return slot

    def refused(self) -> Mapping[int, Exception]:
        with self._changed:
            return dict(self._errors)

    def retry(self) -> None:
        with self._changed:
            for slot in self._slots:
                if slot.state is SlotState.DIRTY:
                    assert slot.window is not None
                    self._errors.pop(slot.window, None)
                    self._transfers.write(slot, slot.window, self._errors)
                    start = time.perf_counter()
                    self._transfers.wait(slot)
                    self._transfers.counters.write_wait_s += time.perf_counter() - start

    def write_back(self) -> None:
        self.retry()  # all others are on their way

    def settle(self) -> None:
        with self._changed:
            self._transfers.settle()

    def forget(self) -> None:
        with self._changed:
            self._next_use = {}
            self._transfers.settle()
            for slot in self._slots:
                slot.put(SlotState.FREE, None)
            self._errors.clear()

    def close(self) -> None:
        with self._changed:
            self._next_use = {}

    def free(self) -> None:
        self._slots, self.hosts = [], []

    def _wait(self, *, reading: bool) -> None:
        start = time.perf_counter()
        self._changed.wait()
        waited = time.perf_counter() - start
        if reading:
            self._transfers.counters.read_wait_s += waited
        else:
            self._transfers.counters.write_wait_s += waited

    def _pump(self) -> None:
        """Start reading every window to come for which there is a slot."""
        for window in self._next_use:
            if holding(self._slots, window) is not None or window in self._transfers.read_errors:
                continue
            slot = choose(self._slots, window, self._next_use)
            if slot is None:
                return
            self._transfers.read(slot, window)
