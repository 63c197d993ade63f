"""Read-ahead, update and write-behind, overlapped.

The thread that steps asks for windows in an order and gets them one after another; other windows
are moved meanwhile (transfers.py). `_pump` starts reads into every slot that may be taken, whenever
something changes: when the scan moves on and when a transfer is through. All but the loop itself
runs on a thread that no interrupt reaches (keeper.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optstream.errors import WindowIOError
from optstream.plan import Plan
from optstream.store.base import Store, WindowFile
from optstream.stream import lane as lanes
from optstream.stream.frozen import Frozen, freeze
from optstream.stream.keeper import Kept, by_keeper
from optstream.stream.part import read_part
from optstream.stream.resident import Resident
from optstream.stream.slots import Slot, SlotState, allocate, choose, holding
from optstream.stream.transfers import Transfers


class Stream(Kept):
    """Joins a plan's windows, a store and the update.

    One thread steps; all state below is guarded by `_changed`, which that thread never takes.
    """

    def __init__(self, store: Store, io_threads: int) -> None:
        super().__init__()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._slots: list[Slot] = []
        self._lanes = lanes.Lanes()
        self._next_use: dict[int, int] = {}
        self._scanning = False
        self._write_errors: dict[int, Exception] = {}
        self._changed = threading.Condition()
        self._transfers = Transfers(store, io_threads, self._changed, then=self._pump)
        self._resident = Resident(store, self._transfers, self._changed)
        self.counters = self._transfers.counters

    @by_keeper
    def extend(self, plan: Plan, files: Sequence[WindowFile]) -> None:
        """Make room for a larger plan, in memory and in the store.

        Args:
            files: what the store must hold for the windows that are new.

        Raises:
            WindowWriteError: what slots hold is not on the drive and still cannot be written.
            StoreError: the store, or memory, cannot hold the new windows; nothing was changed.
        """
        self.drain()
        room = self._resident.make_room(plan)
        self._store.reserve(files)
        self._lanes.drop()
        self._resident.extend(plan, room)
        before, self._plan = self._plan, plan
        if (plan.slot_bytes, plan.num_slots) != (before.slot_bytes, before.num_slots):
            self._lanes.unpin()
            self._slots = []  # before there are others: both would pass the bound
            self._slots = [allocate(plan.slot_bytes) for _ in range(plan.num_slots)]
        self._transfers.open(self._store.num_drives)

    def windows(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Yield each window with its data (uint8, on its device), to be updated in place.

        A window is written once the caller asks for the next one, unless it is resident. Close the
        generator (contextlib.closing) so that a window whose update failed is not written.

        Raises:
            WindowReadError: the window cannot be read; nothing of it was changed.
            WindowWriteError: before the first window, if an earlier write still fails, or as soon
                as slots run out; else see `check`. What could not be written stays in its slot.
        """
        self._begin(order)
        try:
            for window in order:
                slot = self._acquire(window)
                host = slot.tensor[: self._plan.windows[window].data_bytes]
                lane = self._lane(devices[window])
                buffer = lane.load(host)
                lane.wait_loaded()
                yield window, buffer
                self._release(slot, window, lane.unload(host))
        except BaseException:
            # not waited for: whoever interrupts a drive that hangs wants to go on
            self._keeper.post(self._abandon)
            raise
        self._end(order)

    @by_keeper
    def freeze(self, *, room: bool = True) -> Frozen:
        """Make every window as it is now immutable; returns while writes are still under way.

        Those of resident windows that changed begin here. What cannot be written is frozen from its
        slot, as a file in memory.

        Raises:
            OutOfSpaceError: no space for the next writes; nothing was frozen.
            WindowWriteError: memory cannot hold what could not be written; nothing was frozen.
        """
        with contextlib.suppress(WindowIOError):
            self._retry_writes()
        with self._changed:  # no write ends between these lines
            refused = {**self._resident.save(), **self._write_errors}
            files = freeze(self._store, self._transfers.stored, refused, self._data, room=room)
            return Frozen(files, self._transfers.under_way())

    @by_keeper
    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        """Return a copy of some of a window's bytes, as they are now."""
        with self._changed:
            self._transfers.settle()
            slot = self._holding(window)
            if slot is not None:
                return slot.tensor[offset : offset + num_bytes].clone()
        return read_part(self._store, window, offset, num_bytes)

    @by_keeper
    def replace(self, windows: Iterable[int]) -> None:
        """Take these windows, and no others, as stored; what slots held is no longer the state.

        The next update of any other starts from zeros and reads nothing.
        """
        with self._changed:
            self._next_use = {}
            self._resident.forget()
            for slot in self._slots:
                slot.put(SlotState.FREE, None)
            self._write_errors.clear()
            self._transfers.stored = set(windows)

    @by_keeper
    def drain(self) -> None:
        """Wait until all windows but resident ones are on the drive.

        Raises:
            WindowWriteError: one cannot be written.
        """
        with self._changed:
            self._transfers.settle()
        self._retry_writes()

    def close(self) -> None:
        """Wait for transfers, end all threads and give back the buffers and the store's files."""
        try:
            self._close()
        finally:
            self._keeper.close()

    @by_keeper
    def _close(self) -> None:
        with self._changed:
            self._next_use = {}
        self._transfers.close()
        try:
            self._lanes.drop()
            self._lanes.unpin()
            self._slots = []
            self._resident.close()
        finally:
            self._store.close()

    # -- the scan ----------------------------------------------

    @by_keeper
    def _begin(self, order: Sequence[int]) -> None:
        if self._scanning:  # an interrupt came before what should have ended the last scan
            self._abandon()
        self._retry_writes()
        self._look_ahead(order)
        self._scanning = True

    @by_keeper
    def _end(self, order: Sequence[int]) -> None:
        self._look_ahead(order[::-1])
        self._scanning = False

    def _look_ahead(self, order: Sequence[int]) -> None:
        streamed = [window for window in order if window not in self._resident]
        with self._changed:
            self._next_use = {window: position for position, window in enumerate(streamed)}
            self._transfers.read_errors.clear()
            self._pump()

    @by_keeper
    def _acquire(self, window: int) -> Slot:
        """Return the window's slot, BUSY, once its bytes are there."""
        if window in self._resident:
            return self._resident.acquire(window)
        with self._changed:
            while True:
                self._pump()
                slot = holding(self._slots, window)
                if slot is not None and slot.state is SlotState.READY:
                    break
                if slot is not None and slot.state is SlotState.DIRTY:
                    # an update that fails would spoil the only copy; the next step writes it first
                    raise self._write_errors[window]
                if window in self._transfers.read_errors:
                    raise self._transfers.read_errors.pop(window)
                if slot is None and self._transfers.idle:
                    raise next(iter(self._write_errors.values()))
                self._wait(reading=slot is not None and slot.state is SlotState.READING)
            slot.state = SlotState.BUSY
            self._next_use.pop(window, None)
        if window not in self._transfers.stored:
            slot.tensor.zero_()
        return slot

    @by_keeper
    def _release(self, slot: Slot, window: int, ready: lanes.Wait) -> None:
        if window in self._resident:
            self._resident.release(slot, window, ready)
            return
        with self._changed:
            slot.ready = ready
            self._transfers.write(slot, window, self._write_errors)

    def _abandon(self) -> None:
        """Drop the window whose update did not end, and read no further ahead."""
        self._lanes.settle()
        self._scanning = False
        with self._changed:
            self._next_use = {}
            self._resident.abandon()
            for slot in self._slots:
                if slot.state is SlotState.BUSY:
                    slot.put(SlotState.FREE, None)
            # a read that is about to fail belongs to this attempt, not to the next one
            self._changed.wait_for(lambda: not self._transfers.num_reading)

    def _wait(self, *, reading: bool) -> None:
        start = time.perf_counter()
        self._changed.wait()
        waited = time.perf_counter() - start
        if reading:
            self.counters.read_wait_s += waited
        else:
            self.counters.write_wait_s += waited

    def _pump(self) -> None:
        """Start reading every window to come for which there is a slot."""
        for window in self._next_use:
            if holding(self._slots, window) is not None or window in self._transfers.read_errors:
                continue
            slot = choose(self._slots, window, self._next_use)
            if slot is None:
                return
            self._transfers.read(slot, window)

    # -- transfers ----------------------------------------------

    def _retry_writes(self) -> None:
        """Write what could not be written before; WindowWriteError if it still cannot."""
        with self._changed:
            for slot in self._slots:
                if slot.state is SlotState.DIRTY:
                    assert slot.window is not None
                    self._write_errors.pop(slot.window, None)
                    self._transfers.write(slot, slot.window, self._write_errors)
                    start = time.perf_counter()
                    self._transfers.wait(slot)
                    self.counters.write_wait_s += time.perf_counter() - start
        self.check()

    @by_keeper
    def check(self) -> None:
        """Raise the error of a window that could not be written and is kept in its slot, if any."""
        with self._changed:
            if self._write_errors:
                raise next(iter(self._write_errors.values()))

    # -- buffers ----------------------------------------------

    def _holding(self, window: int) -> Slot | None:
        return self._resident.holding(window) or holding(self._slots, window)

    def _data(self, window: int) -> memoryview:
        slot = self._holding(window)
        assert slot is not None, window
        return slot.memory[: self._plan.windows[window].data_bytes]

    def _lane(self, device: torch.device) -> lanes.Lane:
        hosts = [*(slot.tensor for slot in self._slots), *self._resident.hosts]
        return self._lanes.get(device, self._plan.largest_bytes, hosts)
