"""The stream of a store whose windows are pages of files: nothing is copied to slots.

Resident windows are apart from that: they have memory of their own, and a save writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optstream.plan import Plan
from optstream.store.base import Store, WindowFile
from optstream.stream import lane as lanes
from optstream.stream.frozen import Frozen, freeze
from optstream.stream.keeper import Kept, by_keeper
from optstream.stream.page_cache import PageCache
from optstream.stream.part import read_part
from optstream.stream.resident import Resident
from optstream.stream.slots import Slot, view
from optstream.stream.transfers import Transfers


class PagedStream(Kept):
    """Joins a plan's windows, a `cached` store and the update; its methods are those of Stream."""

    def __init__(self, store: Store, io_threads: int) -> None:
        super().__init__()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._lanes = lanes.Lanes()
        self._changed = threading.Condition()
        self._transfers = Transfers(store, io_threads, self._changed, then=lanes.nothing)
        self._resident = Resident(store, self._transfers, self._changed)
        self.counters = self._transfers.counters
        self._pages = PageCache(store, io_threads, self.counters)
        self._scanning = False

    @by_keeper
    def extend(self, plan: Plan, files: Sequence[WindowFile]) -> None:
        self.drain()
        room = self._resident.make_room(plan)
        self._store.reserve(files)
        self._lanes.drop()
        self._resident.extend(plan, room)
        self._plan = plan
        self._transfers.open(self._store.num_drives)

    def windows(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        self._begin(order)
        unloaded: list[lanes.Wait] = []
        try:
            for window in order:
                slot = self._acquire(window)
                # pages are not pinned: the kernel could not reclaim them
                lane = self._lanes.get(
                    devices[window], self._plan.largest_bytes, self._resident.hosts
                )
                buffer = lane.load(slot.tensor)
                lane.wait_loaded()
                yield window, buffer
                unloaded.append(lane.unload(slot.tensor))
                self._release(slot, window, unloaded[-1])
            for wait in unloaded:
                wait()
        except BaseException:
            # not waited for: whoever interrupts a drive that hangs wants to go on
            self._keeper.post(self._abandon)
            raise
        self._end(order)

    @by_keeper
    def freeze(self, *, room: bool = True) -> Frozen:
        self._pages.write_back()
        with self._changed:
            refused = {**self._resident.save(), **self._pages.errors}
            under_way = self._transfers.under_way()
            self._transfers.settle()  # a write here goes through pages, whose digests are taken
        files = freeze(self._store, self._transfers.stored, refused, self._data, room=room)
        return Frozen(files, under_way)

    @by_keeper
    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        self._pages.settle()
        slot = self._resident.holding(window)
        if slot is not None:
            return slot.tensor[offset : offset + num_bytes].clone()
        return read_part(self._store, window, offset, num_bytes)

    @by_keeper
    def replace(self, windows: Iterable[int]) -> None:
        self._pages.forget()
        self._resident.forget()
        self._transfers.stored = set(windows)

    @by_keeper
    def drain(self) -> None:
        self._pages.settle()
        self._pages.retry()
        self.check()

    @by_keeper
    def check(self) -> None:
        self._pages.collect()
        if self._pages.errors:
            raise next(iter(self._pages.errors.values()))

    def close(self) -> None:
        try:
            self._close()
        finally:
            self._keeper.close()

    @by_keeper
    def _close(self) -> None:
        self._pages.close()
        self._transfers.close()
        try:
            self._lanes.drop()
            self._lanes.unpin()
            self._resident.close()
        finally:
            self._store.close()

    def _data(self, window: int) -> memoryview:
        slot = self._resident.holding(window)
        return self._store.view(window) if slot is None else slot.memory

    @by_keeper
    def _begin(self, order: Sequence[int]) -> None:
        if self._scanning:  # an interrupt came before what should have ended the last scan
            self._abandon()
        self._pages.retry()
        self.check()
        self._look_ahead(order)
        self._scanning = True

    @by_keeper
    def _end(self, order: Sequence[int]) -> None:
        self._look_ahead(order[::-1])
        self._scanning = False

    def _look_ahead(self, order: Sequence[int]) -> None:
        paged = [window for window in order if window not in self._resident]
        self._pages.start(self._plan, paged, self._transfers.stored)

    def _abandon(self) -> None:
        self._lanes.settle()
        self._scanning = False
        self._pages.settle()
        self._resident.abandon()

    @by_keeper
    def _acquire(self, window: int) -> Slot:
        if window in self._resident:
            return self._resident.acquire(window)
        self._pages.wait(window)
        slot = view(self._store.view(window))
        if window not in self._transfers.stored:
            slot.tensor.zero_()
        return slot

    @by_keeper
    def _release(self, slot: Slot, window: int, ready: lanes.Wait) -> None:
        if window in self._resident:
            self._resident.release(slot, window, ready)
        else:
            self._transfers.stored.add(window)
            self._pages.updated(window, ready)
