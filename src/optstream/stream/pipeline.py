"""Read-ahead, update and write-behind, overlapped.

The thread that steps asks for windows in an order and gets them one after another; a few threads a
drive move pieces of other windows meanwhile. `_pump` starts reads into every slot that may be
taken, whenever something changes: when the scan moves on and when a write is through.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from optstream.errors import WindowIOError
from optstream.plan import Plan, aligned
from optstream.store.base import PIECE_BYTES, FrozenFile, Store, freeze_copy
from optstream.stream import lane as lanes
from optstream.stream.slots import Slot, SlotState, allocate, choose, holding


@dataclass
class Counters:
    """What was measured since the stream was made; bytes count when their transfer is through."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0


class Stream:
    """Joins a plan's windows, a store and the update.

    One thread steps; all state below is guarded by `_changed`.
    """

    def __init__(self, store: Store, io_threads: int) -> None:
        self.counters = Counters()
        self._store = store
        self._io_threads = io_threads
        self._plan = Plan(window_bytes=0)
        self._slots: list[Slot] = []
        self._unpin: dict[int, lanes.Wait] = {}
        self._pools: list[ThreadPoolExecutor] = []
        self._lanes: dict[torch.device, lanes.Lane] = {}
        self._stored: set[int] = set()
        self._next_use: dict[int, int] = {}
        self._read_errors: dict[int, Exception] = {}
        self._write_errors: dict[int, Exception] = {}
        self._updates = 0
        self._changed = threading.Condition()

    def resize(self, plan: Plan) -> None:
        """Make slots and threads for a plan; what slots held is on the drive already.

        Raises:
            WindowWriteError: something is not, and still cannot be written.
        """
        self.drain()
        self._drop_lanes()
        if plan.slot_bytes > self._plan.slot_bytes or plan.num_slots > self._plan.num_slots:
            self._free_slots()
            self._slots = [allocate(plan.slot_bytes) for _ in range(plan.num_slots)]
        self._plan = plan
        for drive in range(len(self._pools), 0 if plan.in_place else self._store.num_drives):
            self._pools.append(ThreadPoolExecutor(self._io_threads, f"optstream-drive{drive}"))

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
        # whole pieces: what comes from a checkpoint is held against their digests
        first = offset // PIECE_BYTES * PIECE_BYTES
        end = min(aligned(offset + num_bytes, PIECE_BYTES), self._store.file(window).data_bytes)
        copy = allocate(min(end - first, PIECE_BYTES))
        found = torch.empty(num_bytes, dtype=torch.uint8)
        for start in range(first, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, end)
            self._store.read(window, start, copy.memory[: stop - start])
            low, high = max(start, offset), min(stop, offset + num_bytes)
            found[low - offset : high - offset] = copy.tensor[low - start : high - start]
        return found

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
        for pool in self._pools:
            pool.shutdown(wait=True)
        self._pools = []
        try:
            self._drop_lanes()
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
        for lane in self._lanes.values():
            lane.settle()
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
                self._start(slot, window, self._store.read, lanes.nothing, self._read_done)
            else:
                slot.state = SlotState.READY

    # -- transfers ----------------------------------------------

    def _write(self, slot: Slot, window: int, ready: lanes.Wait) -> None:
        with self._changed:
            self._store.prepare_write(window)
            self._updates += 1
            slot.used = self._updates
            slot.state = SlotState.WRITING
            self._stored.add(window)
            self._start(slot, window, self._store.write, ready, self._write_done)

    def _start(
        self,
        slot: Slot,
        window: int,
        transfer: Callable[[int, int, memoryview], None],
        ready: lanes.Wait,
        done: Callable[[Slot, int, Exception | None], None],
    ) -> None:
        """Move a window's pieces on its drive's threads; the last one calls `done`."""
        num_bytes = self._plan.windows[window].data_bytes
        offsets = range(0, num_bytes, PIECE_BYTES)
        if not offsets:
            done(slot, num_bytes, None)
            return
        errors: list[Exception] = []
        left = len(offsets)

        def end_piece() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done(slot, num_bytes, errors[0] if errors else None)
                self._changed.notify_all()

        def move(offset: int) -> None:
            try:
                ready()
                transfer(window, offset, slot.memory[offset : min(offset + PIECE_BYTES, num_bytes)])
            except Exception as error:  # whatever it is, the thread that steps must hear it
                errors.append(error)
            with self._changed:
                end_piece()
                self._pump()

        pool = self._pools[self._store.drive(window)]
        for offset in offsets:
            try:
                pool.submit(move, offset)
            except RuntimeError as error:  # the interpreter is ending, or may have no more threads
                errors.append(error)
                end_piece()

    def _read_done(self, slot: Slot, num_bytes: int, error: Exception | None) -> None:
        if error is None:
            self.counters.read_bytes += num_bytes
            slot.state = SlotState.READY
        else:
            assert slot.window is not None
            _name_window(error, slot.window)
            self._read_errors[slot.window] = error
            slot.put(SlotState.FREE, None)

    def _write_done(self, slot: Slot, num_bytes: int, error: Exception | None) -> None:
        if error is None:
            self.counters.written_bytes += num_bytes
            slot.state = SlotState.READY
        else:
            assert slot.window is not None
            _name_window(error, slot.window)
            self._write_errors[slot.window] = error
            slot.state = SlotState.DIRTY

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
        if device not in self._lanes:
            lane = lanes.make_lane(device, self._plan.slot_bytes)
            self._pin(lane)
            self._lanes[device] = lane
        return self._lanes[device]

    def _pin(self, lane: lanes.Lane) -> None:
        hosts = [slot.tensor for slot in self._slots]
        if self._plan.in_place:
            hosts = [self._view(window) for window in range(self._plan.num_windows)]
        for host in hosts:
            if host.nbytes and host.data_ptr() not in self._unpin:
                unpin = lane.pin(host)
                if unpin is not lanes.nothing:
                    self._unpin[host.data_ptr()] = unpin

    def _drop_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.settle()
        self._lanes = {}

    def _free_slots(self) -> None:
        for unpin in self._unpin.values():
            unpin()
        self._unpin, self._slots = {}, []


def _name_window(error: Exception, window: int) -> None:
    if isinstance(error, WindowIOError):
        error.window = window


def _is_written(slot: Slot) -> bool:
    return slot.state is not SlotState.WRITING
