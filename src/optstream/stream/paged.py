"""The stream of a store whose windows are pages of files: nothing is copied to slots."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optstream.plan import Plan
from optstream.store.base import FrozenFile, Store, freeze_copy
from optstream.stream import lane as lanes
from optstream.stream.page_cache import PageCache
from optstream.stream.part import read_part
from optstream.stream.transfers import Counters


class PagedStream:
    """Joins a plan's windows, a `cached` store and the update; its methods are those of Stream."""

    def __init__(self, store: Store, io_threads: int) -> None:
        self.counters = Counters()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._pages = PageCache(store, io_threads, self.counters)
        self._lanes = lanes.Lanes()
        self._stored: set[int] = set()

    def resize(self, plan: Plan) -> None:
        self.drain()
        self._lanes.drop()
        self._plan = plan

    def windows(
        self, order: Sequence[int], devices: Mapping[int, torch.device]
    ) -> Generator[tuple[int, Tensor], None, None]:
        self._pages.retry()
        self.check()
        self._pages.start(self._plan, order, self._stored)
        unloaded: list[lanes.Wait] = []
        try:
            for window in order:
                self._pages.wait(window)
                host = self._view(window)
                # no pinning: the kernel could not reclaim pinned pages
                lane = self._lanes.get(devices[window], self._plan.slot_bytes, ())
                buffer = lane.load(host)
                lane.wait_loaded()
                yield window, buffer
                unloaded.append(lane.unload(host))
                self._stored.add(window)
                self._pages.updated(window, unloaded[-1])
        except BaseException:
            self._lanes.settle()
            self._pages.settle()
            raise
        for wait in unloaded:
            wait()
        self._pages.start(self._plan, order[::-1], self._stored)

    def freeze(self) -> dict[int, FrozenFile]:
        self._pages.write_back()
        frozen = self._store.freeze(sorted(self._stored - self._pages.errors.keys()))
        for window in self._pages.errors:
            file, name = self._store.file(window), f"window {window} in memory"
            frozen[window] = freeze_copy(file, self._store.view(window), name)
        return frozen

    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        self._pages.settle()
        return read_part(self._store, window, offset, num_bytes)

    def replace(self, windows: Iterable[int]) -> None:
        self._pages.forget()
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
            self._lanes.drop()
        finally:
            self._store.close()

    def _view(self, window: int) -> Tensor:
        memory = self._store.view(window)
        if len(memory) == 0:
            return torch.empty(0, dtype=torch.uint8)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        return host if window in self._stored else host.zero_()
