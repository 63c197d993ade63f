"""Read-ahead, update and write-behind, overlapped.

The thread that steps asks for windows in an order and gets them one after another; other windows
are moved meanwhile (transfers.py). `_pump` starts reads into every slot that may be taken, whenever
something changes: when the scan moves on and when a transfer is through.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from optstream.errors import WindowIOError
from optstream.plan import Plan
from optstream.store.base import FrozenFile, Store, freeze_copy
from optstream.stream import lane as lanes
from optstream.stream.part import read_part
from optstream.stream.slots import Slot, SlotState, allocate, choose, holding
from optstream.stream.transfers import Transfers


class Stream:
    """Joins a plan's windows, a store and the update.

    One thread steps; all state below is guarded by `_changed`.
    """

    def __init__(self, store: Store, io_threads: int) -> None:
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._slots: list[Slot] = []
        self._lanes = lanes.Lanes()
        self._stored: set[int] = set()
        self._next_use: dict[int, int] = {}
        self._read_errors: dict[int, Exception] = {}
        self._write_errors: dict[int, Exception] = {}
        self._updates = 0
        self._changed = threading.Condition()
        self._transfers = Transfers(store, io_threads, self._changed, then=self._pump)
        self.counters = self._transfers.counters

    def resize(self, plan: Plan) -> None:
        """Make slots and threads for a plan; what slots held is on the drive already.

        Raises:
            WindowWriteError: something is not, and still cannot be written.
        """
        self.drain()
        self._lanes.drop()
        if plan.slot_bytes > self._plan.slot_bytes or plan.num_slots > self._plan.num_slots:
            self._free_slots()
            self._slots = [allocate(plan.slot_bytes) for _ in range(plan.num_slots)]
        self._plan = plan
        self._transfers.open(0 if plan.in_place else self._store.num_drives)

    def windows(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Yield each window with its data (uint8, on its device), to be updated in place.

        A window is written once the caller asks for the next one. Close the generator
        (contextlib.closing) so that a window whose update failed is not written.

        Raises:
            WindowReadError: the window cannot be read; nothing of it was changed.
            WindowWriteError: before the first window, if an earlier write still fails, or as soon
                as slots run out; else see `check`. What could not be written stays in its slot.
        """
        if self._plan.in_place:
            yield from self._windows_in_place(order, devices)
            return
        self._retry_writes()
        self._look_ahead(order)
        try:
            for window in order:
                slot = self._acquire(window)
                host = slot.tensor[: self._plan.windows[window].data_bytes]
                lane = self._lane(devices[window])
                buffer = lane.load(host)
                lane.wait_loaded()
                yield window, buffer
                self._write(slot, window, lane.unload(host))
        except BaseException:
            self._abandon()
            raise
        self._look_ahead(list(reversed(order)))

    def _windows_in_place(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        unloaded: list[lanes.Wait] = []
        try:
            for window in order:
                host = self._view(window)
                if window not in self._stored:
                    host.zero_()
                lane = self._lane(devices[window])
                buffer = lane.load(host)
                lane.wait_loaded()
                yield window, buffer
                unloaded.append(lane.unload(host))
                self._stored.add(window)
        except BaseException:
            self._abandon()
            raise
        for wait in unloaded:
            wait()

    def freeze(self) -> dict[int, FrozenFile]:
        """Make every window's bytes on the drive immutable and return them; none is under way.

        What could not be written is frozen from its slot, as a file in memory.

        Raises:
            OutOfSpaceError: no space for the next writes; nothing was frozen.
        """
        with contextlib.suppress(WindowIOError):
            self.drain()
        frozen = self._store.freeze(sorted(self._stored - self._write_errors.keys()))
        for slot in self._slots:
            if slot.state is SlotState.DIRTY and slot.window is not None:
                file = self._store.file(slot.window)
                data = slot.memory[: file.data_bytes]
                frozen[slot.window] = freeze_copy(file, data, f"window {slot.window} in memory")
        return frozen

    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        """Return a copy of some of a window's bytes, as they are now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight())
            slot = holding(self._slots, window)
            if slot is not None:
                return slot.tensor[offset : offset + num_bytes].clone()
        return read_part(self._store, window, offset, num_bytes)

    def replace(self, windows: Iterable[int]) -> None:
        """Take these windows, and no others, as stored; what slots held is no longer the state.

        The next update of any other starts from zeros and reads nothing.
        """
        with self._changed:
            self._next_use = {}
            self._changed.wait_for(lambda: not self._in_flight())
            for slot in self._slots:
                slot.put(SlotState.FREE, None)
            self._write_errors.clear()
            self._stored = set(windows)

    def drain(self) -> None:
        """Wait until every window is on the drive; WindowWriteError if one cannot be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight())
        self._retry_writes()

    def close(self) -> None:
        """Wait for transfers, end all threads and give back the buffers and the store's files."""
        with self._changed:
            self._next_use = {}
        # the threads end with what they were given; slots tell less after an interrupted step
        self._transfers.close()
        try:
            self._lanes.drop()
            self._free_slots()
        finally:
            self._store.close()

    # -- the scan ----------------------------------------------

    def _look_ahead(self, order: Sequence[int]) -> None:
        with self._changed:
            self._next_use = {window: position for position, window in enumerate(order)}
            self._read_errors.clear()
            self._pump()

    def _acquire(self, window: int) -> Slot:
        """Return the window's slot, BUSY, once its bytes are there."""
        with self._changed:
            while True:
                self._pump()
                slot = holding(self._slots, window)
                if slot is not None and slot.state is SlotState.READY:
                    break
                if slot is not None and slot.state is SlotState.DIRTY:
                    # an update that fails would spoil the only copy; the next step writes it first
                    raise self._write_errors[window]
                if window in self._read_errors:
                    raise self._read_errors.pop(window)
                if slot is None and not self._in_flight():
                    raise next(iter(self._write_errors.values()))
                self._wait(reading=slot is not None and slot.state is SlotState.READING)
            slot.state = SlotState.BUSY
            self._next_use.pop(window, None)
        if window not in self._stored:
            slot.tensor.zero_()
        return slot

    def _abandon(self) -> None:
        """Drop the window whose update did not end, and read no further ahead."""
        self._lanes.settle()
        with self._changed:
            self._next_use = {}
            for slot in self._slots:
                if slot.state is SlotState.BUSY:
                    slot.put(SlotState.FREE, None)
            # a read that is about to fail belongs to this attempt, not to the next one
            self._changed.wait_for(lambda: not self._in_flight(SlotState.READING))

    def _wait(self, *, reading: bool) -> None:
        start = time.perf_counter()
        self._changed.wait()
        waited = time.perf_counter() - start
        if reading:
            self.counters.read_wait_s += waited
        else:
            self.counters.write_wait_s += waited

    def _in_flight(self, *moving: SlotState) -> bool:
        moving = moving or (SlotState.READING, SlotState.WRITING)
        return any(slot.state in moving for slot in self._slots)

    def _pump(self) -> None:
        """Start reading every window to come for which there is a slot."""
        for window in self._next_use:
            if holding(self._slots, window) is not None or window in self._read_errors:
                continue
            slot = choose(self._slots, window, self._next_use)
            if slot is None:
                return
            slot.put(SlotState.READING, window)
            if window in self._stored:
                self._read(slot, window)
            else:
                slot.state = SlotState.READY

    # -- transfers ----------------------------------------------

    def _read(self, slot: Slot, window: int) -> None:
        def done(error: Exception | None) -> None:
            if error is None:
                slot.state = SlotState.READY
            else:
                self._read_errors[window] = error
                slot.put(SlotState.FREE, None)

        self._transfers.read(window, self._data(slot, window), done)

    def _write(self, slot: Slot, window: int, ready: lanes.Wait) -> None:
        def done(error: Exception | None) -> None:
            if error is None:
                slot.state = SlotState.READY
            else:
                self._write_errors[window] = error
                slot.state = SlotState.DIRTY

        with self._changed:
            self._store.prepare_write(window)
            self._updates += 1
            slot.used = self._updates
            slot.state = SlotState.WRITING
            self._stored.add(window)
            self._transfers.write(window, self._data(slot, window), ready, done)

    def _data(self, slot: Slot, window: int) -> memoryview:
        return slot.memory[: self._plan.windows[window].data_bytes]

    def _retry_writes(self) -> None:
        """Write what could not be written before; WindowWriteError if it still cannot."""
        with self._changed:
            for slot in self._slots:
                if slot.state is SlotState.DIRTY:
                    assert slot.window is not None
                    self._write_errors.pop(slot.window, None)
                    self._write(slot, slot.window, lanes.nothing)
                    start = time.perf_counter()
                    self._changed.wait_for(partial(_is_written, slot))
                    self.counters.write_wait_s += time.perf_counter() - start
        self.check()

    def check(self) -> None:
        """Raise the error of a window that could not be written and is kept in its slot, if any."""
        with self._changed:
            if self._write_errors:
                raise next(iter(self._write_errors.values()))

    # -- buffers ----------------------------------------------

    def _view(self, window: int) -> Tensor:
        memory = self._store.view(window)
        if len(memory) == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _lane(self, device: torch.device) -> lanes.Lane:
        hosts = [slot.tensor for slot in self._slots]
        if self._plan.in_place:
            hosts = [self._view(window) for window in range(self._plan.num_windows)]
        return self._lanes.get(device, self._plan.slot_bytes, hosts)

    def _free_slots(self) -> None:
        self._lanes.unpin()
        self._slots = []


def _is_written(slot: Slot) -> bool:
    return slot.state is not SlotState.WRITING
