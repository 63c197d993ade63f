"""Windows that are updated in the page cache: brought in ahead of the scan, written back behind it.

    bring_in k+2, k+1 (threads)      update k (the thread that steps)      write_back k-1 (threads)

Where all windows fit into memory nothing is written back before a snapshot: the kernel does it in
its own time, and pages that stay writable cost no fault. Where they do not, each window is written
back behind its update: the kernel can take clean pages at once, and waits for dirty ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from optstream.errors import WindowIOError
from optstream.memory import read_available_bytes, read_dirty_limit_bytes
from optstream.plan import Plan
from optstream.store.base import Store
from optstream.stream.lane import Wait
from optstream.stream.mover import Mover
from optstream.stream.slots import Slot, view
from optstream.stream.transfers import Transfers
from optstream.units import format_bytes

log = logging.getLogger("optstream")

NUM_AHEAD = 2
"""Windows that are brought in while one is updated: as many as with slots."""


class PageCache(Mover):
    """The windows of a `cached` store; they are updated where they are, and are not pinned.

    The kernel could not reclaim pinned pages. Bytes are counted when the thread that calls learns
    that a transfer is through.
    """

    def __init__(self, store: Store, io_threads: int, transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers
        self._counters = transfers.counters
        self._errors: dict[int, Exception] = {}
        self._moving_bytes = 0
        self._unloads: list[Wait] = []
        self._pool = ThreadPoolExecutor(io_threads, "optstream-pages")
        self._preparing = threading.Lock()
        self._coming: deque[int] = deque()
        self._reads: dict[int, Future[int]] = {}
        self._writes: dict[int, Future[int]] = {}
        self._dirty: set[int] = set()
        self._short = self._told = False

    def resize(self, plan: Plan, unpin: Wait) -> None:
        self._moving_bytes = plan.data_bytes - plan.resident_bytes

    def look_ahead(self, order: Sequence[int]) -> None:
        self._wait_unloaded()
        num_bytes = self._moving_bytes
        self._short = read_available_bytes() < num_bytes + num_bytes // 16
        if not self._short:
            self._tell_of_dirty_limit(num_bytes)
        self._coming = deque(order)
        for window in self._reads.keys() - set(order):  # a scan that went on otherwise
            self._reads.pop(window).exception()
        self._read_ahead()

    def take(self, window: int) -> Slot:
        if window in self._coming:
            self._coming.remove(window)
        self._read(window)
        start = time.perf_counter()
        try:
            missing_bytes = _result(self._reads[window], window)
        finally:
            self._counters.read_wait_s += time.perf_counter() - start
            del self._reads[window]
        self._counters.read_bytes += missing_bytes if window in self._transfers.stored else 0
        self._dirty.add(window)
        self._read_ahead()
        return view(self._store.view(window))

    def give_back(self, slot: Slot, window: int, ready: Wait) -> None:
        self._unloads.append(ready)
        self._transfers.stored.add(window)
        if self._short:
            self._write(window, ready)

    def drop(self) -> None:
        self._unloads.clear()
        self.settle()

    def holding(self, window: int) -> Slot | None:
        return view(self._store.view(window)) if window in self._errors else None

    def refused(self) -> Mapping[int, Exception]:
        for window in [window for window, write in self._writes.items() if write.done()]:
            self._end_write(window)
        return self._errors

    def write_back(self) -> None:
        self.settle()
        for window in sorted(self._dirty):
            self._write(window, ready=None)
        self.settle()

    def retry(self) -> None:
        failed = list(self.refused())
        for window in failed:
            self._write(window, ready=None)
        for window in failed:
            self._end_write(window)

    def settle(self) -> None:
        self._wait_unloaded()
        self._coming.clear()
        for read in self._reads.values():
            read.exception()
        self._reads.clear()
        for window in list(self._writes):
            self._end_write(window)

    def forget(self) -> None:
        self.settle()
        self._dirty.clear()
        self._errors.clear()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def free(self) -> None:
        return None

    def _wait_unloaded(self) -> None:
        """Wait until all updates are in the pages."""
        for wait in self._unloads:
            wait()
        self._unloads.clear()

    def _tell_of_dirty_limit(self, num_bytes: int) -> None:
        limit_bytes = read_dirty_limit_bytes()
        if self._told or limit_bytes is None or num_bytes <= limit_bytes:
            return
        self._told = True
        log.warning(
            "%s of page cache change in each step and the kernel slows who has changed %s of it: "
            "raise vm.dirty_ratio and vm.dirty_background_ratio, or keep a part resident (ram=)",
            format_bytes(num_bytes),
            format_bytes(limit_bytes),
        )

    def _read_ahead(self) -> None:
        while self._coming and len(self._reads) < NUM_AHEAD:
            self._read(self._coming.popleft())

    def _read(self, window: int) -> None:
        if window in self._reads:
            return
        if window in self._writes:
            self._end_write(window)
        self._reads[window] = self._pool.submit(self._bring_in, window)

    def _bring_in(self, window: int) -> int:
        with self._preparing:
            self._store.prepare_write(window)
        return self._store.bring_in(window)

    def _write(self, window: int, ready: Wait | None) -> None:
        def write_back() -> int:
            if ready is not None:
                ready()
            return self._store.write_back(window)

        self._writes[window] = self._pool.submit(write_back)

    def _end_write(self, window: int) -> None:
        start = time.perf_counter()
        try:
            self._counters.written_bytes += _result(self._writes[window], window)
        except Exception as error:  # whatever it is, the thread that steps must hear it
            self._errors[window] = error
        else:
            self._errors.pop(window, None)
            self._dirty.discard(window)
        del self._writes[window]
        self._counters.write_wait_s += time.perf_counter() - start


def _result(transfer: Future[int], window: int) -> int:
    try:
        return transfer.result()
    except WindowIOError as error:
        error.window = window
        raise
