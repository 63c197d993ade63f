"""The plan: all windows of an optimizer, and what they cost in bytes.

Pure arithmetic: no I/O, no torch.distributed, no tensor is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from optstream.codecs import coder_bytes
from optstream.errors import ConfigError
from optstream.plan.resident import choose_resident
from optstream.plan.specs import EXTENT_ALIGNMENT, MASTER, ParamSpec, Temporaries
from optstream.plan.windows import Window, build_windows
from optstream.units import aligned, format_bytes

NUM_SLOTS = 4
"""One window being updated, one being written, two being read ahead."""

NUM_DEVICE_BUFFERS = 2
"""On an accelerator: one window being updated, one being copied out and in."""

MIN_WINDOW_BYTES = 64 * 2**10
FIRST_RUN_BYTES = 2**20
"""Of small parameters that make their state in one call of the optimizer, instead of one by one."""

OVERHEAD_BYTES = 32 * 2**20
"""Threads, Python objects and allocator slack: what does not depend on windows or the model."""

PARAM_BYTES, EXTENT_BYTES, WINDOW_BYTES = 6 * 2**10, 3 * 2**10, 8 * 2**10
"""For each planned: names, specs, headers, files, and the manifest of a save or a load; measured
where names have 50 characters (tests/memory)."""

DEVICE_OVERHEAD_BYTES = 16 * 2**20
"""On an accelerator: comparing masters with their parameters, and the allocator's rounding."""

log = logging.getLogger("optstream")


@dataclass(frozen=True)
class Plan:
    """All windows and their cost; `extended` gives the plan with more parameters.

    Attributes:
        resident: indices of the windows that stay in memory between steps.
        cached: the others are page cache and need no slots. What moves is then the most: windows
            that are still in memory are not read, and where all of them fit nothing is written.
        exchange_bytes: buffers for what is sent to other ranks.
    """

    window_bytes: int
    params: tuple[ParamSpec, ...] = ()
    windows: tuple[Window, ...] = ()
    resident: frozenset[int] = frozenset()
    cached: bool = False
    exchange_bytes: int = 0

    def extended(self, params: Sequence[ParamSpec]) -> Plan:
        """Return this plan with windows for more parameters behind the ones it has."""
        windows = tuple(build_windows(params, len(self.params), self.window_bytes))
        _report_large_windows(windows, params, len(self.params), self.window_bytes)
        return replace(self, params=self.params + tuple(params), windows=self.windows + windows)

    def with_resident(self, budget_bytes: int) -> Plan:
        """Return this plan with as many bytes of windows resident; those that are stay so."""
        others = [index for index in range(self.num_windows) if index not in self.resident]
        sizes = [self.windows[index].data_bytes for index in others]
        num_slots = 0 if self.cached else NUM_SLOTS
        chosen = choose_resident(sizes, num_slots, budget_bytes - self.resident_bytes)
        return replace(self, resident=self.resident | {others[place] for place in chosen})

    @property
    def num_windows(self) -> int:
        return len(self.windows)

    @property
    def num_resident(self) -> int:
        return len(self.resident)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of windows that stay in memory between steps."""
        return sum(self.windows[index].data_bytes for index in self.resident)

    @cached_property
    def streamed(self) -> tuple[Window, ...]:
        """The windows that move: all but the resident ones, in the order of the scan."""
        indices = range(self.num_windows)
        return tuple(self.windows[index] for index in indices if index not in self.resident)

    @property
    def num_slots(self) -> int:
        return 0 if self.cached else min(NUM_SLOTS, len(self.streamed))

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a slot: the data of the largest window that moves."""
        return max((window.data_bytes for window in self.streamed), default=0)

    @cached_property
    def largest_bytes(self) -> int:
        """Size of a buffer on an accelerator: the largest window's data."""
        return max((window.data_bytes for window in self.windows), default=0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of state proper, without padding and headers."""
        return sum(window.state_bytes for window in self.windows)

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of all windows on the drive, without headers."""
        return sum(window.data_bytes for window in self.windows)

    @cached_property
    def gradient_bytes(self) -> int:
        """Size of the buffer for one window's gradients in float32 (parameters with masters)."""
        return max((self._window_gradient_bytes(window) for window in self.windows), default=0)

    @cached_property
    def update_bytes(self) -> int:
        """The most that updating one window allocates and frees again."""
        return max((self._window_update_bytes(window) for window in self.windows), default=0)

    @cached_property
    def peak_host_bytes(self) -> int:
        """The most anonymous host memory ever used above the model and its gradients."""
        buffers = self.resident_bytes + self.num_slots * self.slot_bytes + self.exchange_bytes
        return buffers + self._working_bytes("cpu") + self.bookkeeping_bytes + OVERHEAD_BYTES

    @cached_property
    def bookkeeping_bytes(self) -> int:
        """What keeping track of parameters and windows takes, whatever their size."""
        pieces = [piece for window in self.windows for piece in window.pieces]
        of_extents = EXTENT_BYTES * sum(len(piece.extents) for piece in pieces)
        return PARAM_BYTES * len(self.params) + of_extents + WINDOW_BYTES * self.num_windows

    @cached_property
    def peak_device_bytes(self) -> int:
        """The most memory ever used on an accelerator above the model and its gradients, of one."""
        devices = {window.device for window in self.windows} - {"cpu"}
        working = [self._working_bytes(device) for device in devices]
        fixed = NUM_DEVICE_BUFFERS * self.largest_bytes + DEVICE_OVERHEAD_BYTES
        return max((fixed + num_bytes for num_bytes in working), default=0)

    @cached_property
    def scratch_bytes(self) -> int:
        """Size of the buffer for decoded state, and for gradients of it in float32."""
        return max((self._window_scratch_bytes(window) for window in self.windows), default=0)

    def _working_bytes(self, device: str) -> int:
        """What updates on a device allocate: temporaries, and buffers for gradients and values."""
        windows = [window for window in self.windows if window.device == device]
        gradient = self.gradient_bytes if any(map(self._window_gradient_bytes, windows)) else 0
        decoded = 0
        if any(map(self._window_scratch_bytes, windows)):
            decoded = self.scratch_bytes + coder_bytes(torch.device(device).type)
        return gradient + decoded + max(map(self._window_update_bytes, windows), default=0)

    @cached_property
    def written_bytes_per_step(self) -> int:
        return self.data_bytes - self.resident_bytes

    @cached_property
    def read_bytes_per_step(self) -> int:
        """Mean of two steps: scans alternate, and what ends one in the slots starts the next."""
        kept = self.num_slots
        first, last = self.streamed[:kept], self.streamed[len(self.streamed) - kept :]
        kept_bytes = sum(window.data_bytes for window in (*first, *last)) // 2
        return self.written_bytes_per_step - kept_bytes

    def _window_gradient_bytes(self, window: Window) -> int:
        return sum(
            aligned(piece.numel * 4, EXTENT_ALIGNMENT)
            for piece in window.pieces
            if self.params[piece.param].has_master and not self.params[piece.param].is_encoded
        )

    def _window_scratch_bytes(self, window: Window) -> int:
        specs = [(self.params[piece.param], piece.numel) for piece in window.pieces]
        return max(
            (spec.scratch_bytes(min(numel, spec.max_tile)) for spec, numel in specs), default=0
        )

    def _window_update_bytes(self, window: Window) -> int:
        if window.gathered:
            return _gathered_bytes([self.params[piece.param] for piece in window.pieces])
        batched = sequential = first = all_first = 0
        for piece in window.pieces:
            spec = self.params[piece.param]
            numel = min(piece.numel, spec.max_tile)
            temporary = spec.of_tile(spec.temporary_bytes, numel)
            # what is decoded is updated by itself
            if spec.temporaries is Temporaries.BATCHED and not spec.is_encoded:
                batched += temporary
            else:
                sequential = max(sequential, temporary)
            of_first = spec.of_tile(spec.first_bytes, numel)
            first, all_first = max(first, of_first), all_first + of_first
        return max(batched + sequential, first, min(all_first, FIRST_RUN_BYTES))


def _gathered_bytes(specs: Sequence[ParamSpec]) -> int:
    """Return what updating a window allocates whose parameters ranks update together.

    They are updated by one call, which makes the state that is new and then takes whole parameters
    one after the other.
    """
    made = sum(state.num_bytes for spec in specs for state in spec.states if state.key != MASTER)
    return made + max(spec.temporary_bytes + spec.exchange_bytes for spec in specs)


def parse_window_bytes(window_bytes: int) -> int:
    """Return the window size if it is one; ConfigError otherwise (0 never means "everything")."""
    if window_bytes < MIN_WINDOW_BYTES:
        raise ConfigError(
            f"window={window_bytes} bytes is too small; give at least "
            f"{format_bytes(MIN_WINDOW_BYTES)}"
        )
    return window_bytes


def _report_large_windows(
    windows: Iterable[Window], params: Sequence[ParamSpec], first: int, window_bytes: int
) -> None:
    large = [window for window in windows if window.state_bytes > window_bytes]
    if not large:
        return
    largest = max(large, key=lambda window: window.state_bytes)
    name = params[largest.pieces[0].param - first].name
    log.warning(
        "%d of the windows exceed window=%s because a parameter is updated as a whole; the "
        "largest is %s (%s); memory is planned for it",
        len(large),
        format_bytes(window_bytes),
        format_bytes(largest.state_bytes),
        name,
    )
