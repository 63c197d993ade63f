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
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from optstream.errors import WindowIOError
from optstream.memory import read_available_bytes, read_dirty_limit_bytes
from optstream.plan import Plan
from optstream.store.base import Store
from optstream.stream.lane import Wait
from optstream.stream.transfers import Counters
from optstream.units import format_bytes

log = logging.getLogger("optstream")

NUM_AHEAD = 2
"""Windows that are brought in while one is updated: as many as with slots."""


class PageCache:
    """Moves the windows of a `cached` store.

    One thread calls; bytes are counted when it learns that a transfer is through.

    Attributes:
        errors: why windows that were updated could not be written back; their pages are in memory.
    """

    def __init__(self, store: Store, io_threads: int, counters: Counters) -> None:
        self.errors: dict[int, Exception] = {}
        self._store = store
        self._counters = counters
        self._pool = ThreadPoolExecutor(io_threads, "optstream-pages")
        self._preparing = threading.Lock()
        self._coming: deque[int] = deque()
        self._stored: Collection[int] = ()
        self._reads: dict[int, Future[int]] = {}
        self._writes: dict[int, Future[int]] = {}
        self._dirty: set[int] = set()
        self._short = self._told = False

    def start(self, plan: Plan, order: Sequence[int], stored: Collection[int]) -> None:
        """Begin a scan, or look ahead at the next one.

        Args:
            stored: windows that hold something; of others nothing is read.
        """
        num_bytes = plan.data_bytes - plan.resident_bytes
        self._short = read_available_bytes() < num_bytes + num_bytes // 16
        if not self._short:
            self._tell_of_dirty_limit(num_bytes)
        self._coming = deque(order)
        self._stored = stored
        for window in self._reads.keys() - set(order):  # a scan that went on otherwise
            self._reads.pop(window).exception()
        self._read_ahead()

    def wait(self, window: int) -> None:
        """Return when a window's pages are in memory and may be updated.

        Raises:
            WindowReadError, WindowWriteError: nothing of it was changed.
        """
        if window in self._coming:
            self._coming.remove(window)
        self._read(window)
        start = time.perf_counter()
        try:
            missing_bytes = _result(self._reads[window], window)
        finally:
            self._counters.read_wait_s += time.perf_counter() - start
            del self._reads[window]
        self._counters.read_bytes += missing_bytes if window in self._stored else 0
        self._dirty.add(window)
        self._read_ahead()

    def updated(self, window: int, ready: Wait) -> None:
        """Be told that a window's update was queued; `ready` waits until it is in the pages."""
        if self._short:
            self._write(window, ready)

    def write_back(self) -> None:
        """Write back all that was updated since it last was, and forget what was read ahead."""
        self.settle()
        for window in sorted(self._dirty):
            self._write(window, ready=None)
        self.settle()

    def retry(self) -> None:
        """Try again what could not be written back, and wait for that."""
        self.collect()
        failed = list(self.errors)
        for window in failed:
            self._write(window, ready=None)
        for window in failed:
            self._end_write(window)

    def settle(self) -> None:
        """Wait for all transfers and forget what was read ahead; errors of writes are kept."""
        self._coming.clear()
        for read in self._reads.values():
            read.exception()
        self._reads.clear()
        for window in list(self._writes):
            self._end_write(window)

    def collect(self) -> None:
        """Take note of the writes that are through."""
        for window in [window for window, write in self._writes.items() if write.done()]:
            self._end_write(window)

    def forget(self) -> None:
        """Take what was updated for gone: other bytes are the state now."""
        self.settle()
        self._dirty.clear()
        self.errors.clear()

    def close(self) -> None:
        """End the threads, with what they were given."""
        self._pool.shutdown(wait=True)

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
            self.errors[window] = error
        else:
            self.errors.pop(window, None)
            self._dirty.discard(window)
        del self._writes[window]
        self._counters.write_wait_s += time.perf_counter() - start


def _result(transfer: Future[int], window: int) -> int:
    try:
        return transfer.result()
    except WindowIOError as error:
        error.window = window
        raise
