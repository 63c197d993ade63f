"""All host buffers of a stream: slots that windows share, and one for each resident window."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from optstream.errors import OutOfSpaceError
from optstream.memory import read_available_bytes
from optstream.plan import Plan
from optstream.store.base import Store
from optstream.stream.lane import Lane, Lanes
from optstream.stream.slots import Slot, allocate, allocate_memory, choose, cut, holding, view
from optstream.units import format_bytes


class Buffers:
    """Finds the slot of a window.

    Attributes:
        shared: slots that windows take in turn.
        resident: by window, slots that are never given away.
        lanes: to and from devices, for which all buffers are pinned.
    """

    def __init__(self, store: Store) -> None:
        self.shared: list[Slot] = []
        self.resident: dict[int, Slot] = {}
        self.lanes = Lanes()
        self._store = store
        self._plan = Plan(window_bytes=0)
        self._slabs: list[Tensor] = []  # of resident windows: many small ones pin slowly

    def make_room(self, plan: Plan) -> memoryview:
        """Return memory for the windows that a larger plan adds to the resident ones.

        Raises:
            OutOfSpaceError: there is not so much.
        """
        num_bytes = 0 if self._store.in_place else plan.resident_bytes - self._plan.resident_bytes
        try:
            return allocate_memory(num_bytes) if num_bytes else memoryview(b"")
        except OSError as error:
            raise OutOfSpaceError(
                errno.ENOMEM,
                f"resident windows need {format_bytes(num_bytes)} of memory, "
                f"{format_bytes(read_available_bytes())} is left to this process; give a smaller "
                "ram",
            ) from error

    def resize(self, plan: Plan, room: memoryview) -> None:
        """Make slots for a larger plan; what shared ones held is on the drive already.

        Args:
            room: from `make_room`, for the new resident windows.
        """
        self.lanes.drop()
        before = self._plan
        if (plan.slot_bytes, plan.num_slots) != (before.slot_bytes, before.num_slots):
            self.lanes.unpin()
            self.shared = []  # before there are others: both would pass the bound
            self.shared = [allocate(plan.slot_bytes) for _ in range(plan.num_slots)]
        new = sorted(plan.resident - before.resident)
        if self._store.in_place:
            own = [view(self._store.view(window)) for window in new]
            self._slabs += [slot.tensor for slot in own]
        else:
            own = list(cut(room, [plan.windows[window].data_bytes for window in new]))
            self._slabs.append(view(room).tensor)
        self.resident |= dict(zip(new, own, strict=True))
        self._plan = plan

    def holding(self, window: int) -> Slot | None:
        """Return the slot that holds a window, if any."""
        own = self.resident.get(window)
        if own is None:
            return holding(self.shared, window)
        return own if own.window is not None else None

    def place(self, window: int, next_use: Mapping[int, int]) -> Slot | None:
        """Return the slot that a window which none holds may be read into now, if any."""
        return self.resident.get(window) or choose(self.shared, window, next_use)

    def __iter__(self) -> Iterator[Slot]:
        yield from self.shared
        yield from self.resident.values()

    def lane(self, device: torch.device) -> Lane:
        """Return a device's lane; all buffers are pinned for it."""
        hosts = [*(slot.tensor for slot in self.shared), *self._slabs]
        return self.lanes.get(device, self._plan.largest_bytes, hosts)

    def close(self) -> None:
        """Give back all buffers."""
        self.lanes.drop()
        self.lanes.unpin()
        self.shared, self.resident, self._slabs = [], {}, []
