"""Slots: the few reusable host buffers that hold windows, and which of them to use next.

    FREE ──► READING ──► READY ──► BUSY ──► WRITING ──► READY
               │ error     ▲ never stored      │ error
               ▼           │                   ▼
             FREE ─────────┘                 DIRTY ──► WRITING (retried)

A READY slot has the same bytes as the drive, so another window may take it; a DIRTY one has the
only copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from optstream.store.pages import map_private
from optstream.units import PAGE_BYTES

NEVER = 2**62


class SlotState(Enum):
    FREE = auto()
    READING = auto()
    READY = auto()
    BUSY = auto()
    WRITING = auto()
    DIRTY = auto()


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        memory: page-aligned bytes, for transfers.
        tensor: the same bytes as uint8.
        window: what it holds (None where FREE).
        used: when its window was last updated, a running number.
        newer: the drive has not got these bytes (of a resident window, see resident.py).
        ready: blocks until the bytes are in host memory.
    """

    memory: memoryview
    tensor: Tensor
    state: SlotState = SlotState.FREE
    window: int | None = None
    used: int = 0
    newer: bool = False
    ready: Callable[[], None] = lambda: None

    def put(self, state: SlotState, window: int | None) -> None:
        self.state, self.window = state, window


def allocate(num_bytes: int) -> Slot:
    """Return a slot of private, page-aligned memory whose pages are all there already."""
    return view(allocate_memory(num_bytes))


def allocate_memory(num_bytes: int) -> memoryview:
    """Return private, page-aligned memory whose pages are all there already."""
    memory = map_private(max(num_bytes, PAGE_BYTES))
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return memory


def view(memory: memoryview) -> Slot:
    """Return a slot over memory that is there."""
    if len(memory) == 0:
        return Slot(memory, torch.empty(0, dtype=torch.uint8))
    return Slot(memory, torch.frombuffer(memory, dtype=torch.uint8))


def holding(slots: Sequence[Slot], window: int) -> Slot | None:
    """Return the slot that holds a window, if any."""
    return next((slot for slot in slots if slot.window == window), None)


def choose(slots: Sequence[Slot], window: int, next_use: Mapping[int, int]) -> Slot | None:
    """Return the slot to take for `window` now: a free one, or of those needed later the last.

    Args:
        next_use: position of each window that is still to come in this scan. Scans alternate, so of
        the
            windows that are through the one updated first is needed last.
    """
    free = next((slot for slot in slots if slot.state is SlotState.FREE), None)
    if free is not None:
        return free

    def when(slot: Slot) -> tuple[int, int]:
        return next_use.get(slot.window, NEVER) if slot.window is not None else NEVER, -slot.used

    # a slot that is still being written may be the right one: the next step would have to read
    # what another one holds
    usable = [slot for slot in slots if slot.state in (SlotState.READY, SlotState.WRITING)]
    last = max(usable, key=when, default=None)
    if last is None or when(last)[0] <= next_use.get(window, NEVER):
        return None
    return last if last.state is SlotState.READY else None
