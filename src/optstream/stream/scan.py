"""Read-ahead, update and write-behind, in scans: the one stream, whatever moves its windows.

The thread that steps asks for windows in an order and gets them one after another, while others
are moved. The next scan goes back the same way, so what is in memory at the end of one is used
first.

    idle ── _begin ──► scanning ── _end ──► idle; the first windows of the next scan are coming
      ▲                    │ an error, an interrupt
      └───── _abandon ─────┘

All but the loop itself runs on a thread that no interrupt reaches (keeper.py).
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
from optstream.stream.mover import Mover
from optstream.stream.page_cache import PageCache
from optstream.stream.part import read_part
from optstream.stream.pipeline import Pipeline
from optstream.stream.resident import Resident
from optstream.stream.slots import Slot
from optstream.stream.transfers import Transfers


class Stream(Kept):
    """Joins a plan's windows, a store and the update.

    One thread steps; what transfers change is guarded by `_changed`, which that thread never takes.

    Attributes:
        counters: what was moved and waited for since the stream was made.
    """

    def __init__(self, store: Store, io_threads: int) -> None:
        super().__init__()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._lanes = lanes.Lanes()
        self._scanning = False
        self._changed = threading.Condition()
        self._transfers = Transfers(store, io_threads, self._changed)
        self._resident = Resident(store, self._transfers, self._changed)
        self._mover: Mover = (
            PageCache(store, io_threads, self._transfers)
            if store.cached
            else Pipeline(store, self._transfers, self._changed)
        )
        self.counters = self._transfers.counters

    @by_keeper
    def extend(self, plan: Plan, files: Sequence[WindowFile]) -> None:
        """Make room for a larger plan, in memory and in the store.

        Args:
            files: what the store must hold for the windows that are new.

        Raises:
            WindowWriteError: what memory holds is not on the drive and still cannot be written.
            StoreError: the store, or memory, cannot hold the new windows; nothing was changed.
        """
        self.drain()
        room = self._resident.make_room(plan)
        self._store.reserve(files)
        self._lanes.drop()
        self._resident.extend(plan, room)
        self._plan = plan
        self._mover.resize(plan, self._lanes.unpin)
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
                as slots run out; else see `check`. What could not be written stays in memory.
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
        """Make every window as it is now immutable; writes to slots' files may still be under way.

        Those of resident windows that changed begin here. What cannot be written is frozen from
        memory, as a file there.

        Raises:
            OutOfSpaceError: no space for the next writes; nothing was frozen.
            WindowWriteError: memory cannot hold what could not be written; nothing was frozen.
        """
        self._mover.write_back()
        with self._changed:  # no write ends between these lines, unless waited for
            refused = {**self._resident.save(), **self._mover.refused()}
            under_way = self._transfers.under_way()
            if self._store.cached:
                self._transfers.settle()
            files = freeze(self._store, self._transfers.stored, refused, self._data, room=room)
        return Frozen(files, under_way)

    @by_keeper
    def look(self, window: int, offset: int, num_bytes: int) -> Tensor:
        """Return a copy of some of a window's bytes, as they are now."""
        self._mover.settle()
        slot = self._holding(window)
        if slot is not None:
            return slot.tensor[offset : offset + num_bytes].clone()
        return read_part(self._store, window, offset, num_bytes)

    @by_keeper
    def replace(self, windows: Iterable[int]) -> None:
        """Take these windows, and no others, as stored; what memory held is no longer the state.

        The next update of any other starts from zeros and reads nothing.
        """
        self._mover.forget()
        self._resident.forget()
        self._transfers.stored = set(windows)

    @by_keeper
    def drain(self) -> None:
        """Wait until all windows but resident ones are on the drive.

        Raises:
            WindowWriteError: one cannot be written.
        """
        self._mover.settle()
        self._mover.retry()
        self.check()

    @by_keeper
    def check(self) -> None:
        """Raise the error of a window that could not be written and is kept in memory, if any."""
        for error in self._mover.refused().values():
            raise error

    def close(self) -> None:
        """Wait for transfers, end all threads and give back the buffers and the store's files."""
        try:
            self._close()
        finally:
            self._keeper.close()

    @by_keeper
    def _close(self) -> None:
        self._mover.close()
        self._transfers.close()
        try:
            self._lanes.drop()
            self._lanes.unpin()
            self._mover.free()
            self._resident.close()
        finally:
            self._store.close()

    # -- the scan ----------------------------------------------

    @by_keeper
    def _begin(self, order: Sequence[int]) -> None:
        if self._scanning:  # an interrupt came before what should have ended the last scan
            self._abandon()
        self._mover.retry()
        self.check()
        self._mover.look_ahead(self._moving(order))
        self._scanning = True

    @by_keeper
    def _end(self, order: Sequence[int]) -> None:
        self._mover.look_ahead(self._moving(order[::-1]))
        self._scanning = False

    def _abandon(self) -> None:
        """Drop the window whose update did not end, and read no further ahead."""
        self._lanes.settle()
        self._scanning = False
        self._resident.abandon()
        self._mover.drop()

    @by_keeper
    def _acquire(self, window: int) -> Slot:
        """Return the window's slot once its bytes are there."""
        if window in self._resident:
            return self._resident.acquire(window)
        slot = self._mover.take(window)
        if window not in self._transfers.stored:
            slot.tensor.zero_()
        return slot

    @by_keeper
    def _release(self, slot: Slot, window: int, ready: lanes.Wait) -> None:
        keeper = self._resident if window in self._resident else self._mover
        keeper.give_back(slot, window, ready)

    def _moving(self, order: Sequence[int]) -> list[int]:
        return [window for window in order if window not in self._resident]

    # -- buffers ----------------------------------------------

    def _holding(self, window: int) -> Slot | None:
        return self._resident.holding(window) or self._mover.holding(window)

    def _data(self, window: int) -> memoryview:
        slot = self._holding(window)
        assert slot is not None, window
        return slot.memory[: self._plan.windows[window].data_bytes]

    def _lane(self, device: torch.device) -> lanes.Lane:
        hosts = [*self._mover.hosts, *self._resident.hosts]
        return self._lanes.get(device, self._plan.largest_bytes, hosts)
