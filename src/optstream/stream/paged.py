"""The stream of a store whose windows are pages of files: nothing is copied to slots.

Resident windows are apart from that: they have memory of their own, and a save writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optstream.errors import WindowIOError
from optstream.plan import Plan
from optstream.store.base import PIECE_BYTES, FrozenFile, Store, WindowFile, freeze_copy
from optstream.stream import lane as lanes
from optstream.stream.buffers import Buffers
from optstream.stream.page_cache import PageCache
from optstream.stream.part import read_part
from optstream.stream.slots import Slot, SlotState, view
from optstream.stream.transfers import Counters


class PagedStream:
    """Joins a plan's windows, a `cached` store and the update; its methods are those of Stream."""

    def __init__(self, store: Store, io_threads: int) -> None:
        self.counters = Counters()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._pages = PageCache(store, io_threads, self.counters)
        self._buffers = Buffers(store)
        self._stored: set[int] = set()

    def extend(self, plan: Plan, files: Sequence[WindowFile]) -> None:
        self.drain()
        room = self._buffers.make_room(plan)
        self._store.reserve(files)
        self._buffers.resize(plan, room)
        self._plan = plan

    def windows(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        self._pages.retry()
        self.check()
        paged = [window for window in order if window not in self._plan.resident]
        self._pages.start(self._plan, paged, self._stored)
        unloaded: list[lanes.Wait] = []
        busy = None
        try:
            for window in order:
                host, busy = self._host(window), window
                # pages are not pinned: the kernel could not reclaim them
                lane = self._buffers.lane(devices[window])
                buffer = lane.load(host)
                lane.wait_loaded()
                yield window, buffer
                unloaded.append(lane.unload(host))
                self._release(window, unloaded[-1])
                busy = None
        except BaseException:
            self._abandon(busy)
            raise
        for wait in unloaded:
            wait()
        self._pages.start(self._plan, paged[::-1], self._stored)

    def freeze(self) -> dict[int, FrozenFile]:
        self._pages.write_back()
        errors = self._pages.errors.keys() | self._write_resident()
        frozen = self._store.freeze(sorted(self._stored - errors))
        for window in errors:
            own = self._buffers.resident.get(window)
            data = self._store.view(window) if own is None else own.memory
            name = f"window {window} in memory"
            frozen[window] = freeze_copy(self._store.file(window), data, name)
        return frozen

    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        self._pages.settle()
        slot = self._buffers.holding(window)
        if slot is not None:
            slot.ready()
            return slot.tensor[offset : offset + num_bytes].clone()
        return read_part(self._store, window, offset, num_bytes)

    def replace(self, windows: Iterable[int]) -> None:
        self._pages.forget()
        for slot in self._buffers:
            slot.ready()
            slot.put(SlotState.FREE, None)
            slot.newer = False
        self._stored = set(windows)

    def drain(self) -> None:
        self._pages.settle()
        self._pages.retry()
        self.check()

    def check(self) -> None:
        self._pages.collect()
        if self._pages.errors:
            raise next(iter(self._pages.errors.values()))

    def close(self) -> None:
        self._pages.close()
        try:
            self._buffers.close()
        finally:
            self._store.close()

    # -- a window of the scan -----------------------------------

    def _host(self, window: int) -> Tensor:
        """Return where a window is to be updated, once its bytes are there."""
        slot = self._buffers.resident.get(window)
        if slot is None:
            self._pages.wait(window)
            host = view(self._store.view(window)).tensor
        else:
            slot.ready()
            host = slot.tensor
            if slot.window is None and window in self._stored:
                self._move(window, slot, self._store.read)
                self.counters.read_bytes += len(slot.memory)
            slot.put(SlotState.READY, window)
        return host if window in self._stored else host.zero_()

    def _release(self, window: int, ready: lanes.Wait) -> None:
        self._stored.add(window)
        slot = self._buffers.resident.get(window)
        if slot is None:
            self._pages.updated(window, ready)
        else:
            slot.ready, slot.newer = ready, True

    def _abandon(self, busy: int | None) -> None:
        """Drop a resident window whose update did not end, where the drive has it."""
        self._buffers.lanes.settle()
        self._pages.settle()
        slot = None if busy is None else self._buffers.resident.get(busy)
        if slot is not None and not slot.newer:
            slot.put(SlotState.FREE, None)

    # -- resident windows ---------------------------------------

    def _write_resident(self) -> set[int]:
        """Write resident windows that the drive has not got; return those that cannot be."""
        failed = set()
        for window, slot in self._buffers.resident.items():
            if not slot.newer:
                continue
            slot.ready()
            try:
                self._store.prepare_write(window)
                self._move(window, slot, self._store.write)
                num_bytes = self._store.write_back(window)
            except WindowIOError:
                failed.add(window)
                continue
            slot.newer = False
            self.counters.written_bytes += num_bytes
            self.counters.saved_bytes += num_bytes
        return failed

    def _move(
        self, window: int, slot: Slot, transfer: Callable[[int, int, memoryview], None]
    ) -> None:
        try:
            for offset in range(0, len(slot.memory), PIECE_BYTES):
                transfer(window, offset, slot.memory[offset : offset + PIECE_BYTES])
        except WindowIOError as error:
            error.window = window
            raise
