"""Which tensors go in which window, and what that costs in bytes.

Pure arithmetic: no I/O, no torch.distributed, no tensor is made. Parameters are taken in order
until a window holds `window_bytes` of stored state. A rule that is elementwise gets flat slices, so
that one huge parameter does not break the bound; any other rule gets whole parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from optstream.errors import ConfigError
from optstream.units import format_bytes

MASTER = "master"
NUM_SLOTS = 4
"""One window being updated, one being written, two being read ahead."""

NUM_DEVICE_BUFFERS = 2
"""On an accelerator: one window being updated, one being copied out and in."""

MIN_WINDOW_BYTES = 64 * 2**10
SLICE_ALIGNMENT = 4096
"""Elements. Vectorised kernels give the same bits for a slice as for the whole when slices start at
multiples of this (tests/parity/test_slices.py)."""

MAX_TILE = 2**20
"""Elements updated at once; temporaries stay in the processor's cache and out of the bound."""

EXTENT_ALIGNMENT = 64
"""Bytes, as torch's own allocations: a matrix product may depend on its operands' alignment."""

PAGE_BYTES = 4096
OVERHEAD_BYTES = 32 * 2**20
"""Threads, Python objects and allocator slack: what does not depend on windows or the model."""

DEVICE_OVERHEAD_BYTES = 16 * 2**20
"""On an accelerator: comparing a tile of masters with their parameters, the allocator's rounding."""

log = logging.getLogger("optstream")


@dataclass(frozen=True)
class StateTensor:
    """One streamed tensor of a parameter's state: the master, or what the optimizer keeps.

    Attributes:
        key: the optimizer's own key ("exp_avg"), or MASTER.
        shape, stride: elements, as the optimizer makes it for the whole parameter.
        dtype: as the optimizer makes it.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Temporaries(Enum):
    """What one call of an optimizer's step allocates besides state."""

    NONE = "none"
    """Fused kernels: nothing."""
    ONE = "one"
    """A loop over parameters: what one of them needs, so that small tiles make it small."""
    BATCHED = "batched"
    """foreach: what all parameters of the call need."""


@dataclass(frozen=True)
class ParamSpec:
    """What the plan needs to know of a parameter.

    Attributes:
        name: FQN, or "group0.param3" where no name is known.
        group, position: where it stands in `param_groups`.
        shape, dtype, device: of the parameter itself.
        states: its streamed tensors.
        elementwise: flat slices of it may be updated by themselves.
        temporaries: which temporaries of an update live at the same time.
        first_bytes: peak of what the first update allocates, the new state included.
        temporary_bytes: peak of what any later update allocates.
    """

    name: str
    group: int
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    states: tuple[StateTensor, ...]
    elementwise: bool
    temporaries: Temporaries = Temporaries.ONE
    first_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_master(self) -> bool:
        return any(state.key == MASTER for state in self.states)

    @property
    def state_bytes(self) -> int:
        return sum(state.num_bytes for state in self.states)

    @property
    def max_tile(self) -> int:
        """Elements of it that are updated at once: tiles only help rules that go one by one."""
        tiled = self.elementwise and self.temporaries is Temporaries.ONE
        return MAX_TILE if tiled else self.numel


@dataclass(frozen=True)
class Extent:
    """The byte range of a window's data that holds one tensor (of a slice)."""

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """A parameter, or a flat slice of it, with its extents in one window.

    Attributes:
        param: index in `Plan.params`.
        start, stop: flat elements of the parameter; 0 and numel where it is whole.
        whole: the rule sees the parameter in its own shape.
    """

    param: int
    start: int
    stop: int
    whole: bool
    extents: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def extent(self, key: str) -> Extent:
        """Return the extent of a key that the plan knows."""
        return next(extent for extent in self.extents if extent.key == key)


@dataclass(frozen=True)
class Window:
    """The pieces whose state is in memory together.

    Attributes:
        pieces: in the order of their extents.
        data_bytes: size on the drive behind the header, a multiple of PAGE_BYTES.
        device: where all its parameters live.
    """

    pieces: tuple[Piece, ...]
    data_bytes: int
    device: str

    @property
    def state_bytes(self) -> int:
        return sum(extent.num_bytes for piece in self.pieces for extent in piece.extents)


@dataclass(frozen=True)
class Plan:
    """All windows and their cost; `extended` gives the plan with more parameters."""

    window_bytes: int
    params: tuple[ParamSpec, ...] = ()
    windows: tuple[Window, ...] = ()
    in_place: bool = False

    def extended(self, params: Sequence[ParamSpec]) -> Plan:
        """Return this plan with windows for more parameters behind the ones it has."""
        windows = tuple(_windows(params, len(self.params), self.window_bytes))
        _report_large_windows(windows, params, len(self.params), self.window_bytes)
        return Plan(
            self.window_bytes, self.params + tuple(params), self.windows + windows, self.in_place
        )

    @property
    def num_windows(self) -> int:
        return len(self.windows)

    @property
    def num_slots(self) -> int:
        return 0 if self.in_place else min(NUM_SLOTS, self.num_windows)

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a slot: the largest window's data."""
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
        stored = self.data_bytes if self.in_place else self.num_slots * self.slot_bytes
        return stored + self._working_bytes("cpu") + OVERHEAD_BYTES

    @cached_property
    def peak_device_bytes(self) -> int:
        """The most memory ever used on an accelerator above the model and its gradients, of one."""
        devices = {window.device for window in self.windows} - {"cpu"}
        working = [self._working_bytes(device) for device in devices]
        fixed = NUM_DEVICE_BUFFERS * self.slot_bytes + DEVICE_OVERHEAD_BYTES
        return max((fixed + num_bytes for num_bytes in working), default=0)

    def _working_bytes(self, device: str) -> int:
        """What updates on a device allocate: temporaries, and gradients in float32."""
        windows = [window for window in self.windows if window.device == device]
        gradient = self.gradient_bytes if any(map(self._window_gradient_bytes, windows)) else 0
        return gradient + max(map(self._window_update_bytes, windows), default=0)

    @cached_property
    def written_bytes_per_step(self) -> int:
        return 0 if self.in_place else self.data_bytes

    @cached_property
    def read_bytes_per_step(self) -> int:
        """Mean of two steps: scans alternate, and what ends one in the slots starts the next."""
        if self.in_place:
            return 0
        kept = self.num_slots
        first, last = self.windows[:kept], self.windows[self.num_windows - kept :]
        kept_bytes = sum(window.data_bytes for window in (*first, *last)) // 2
        return self.data_bytes - kept_bytes

    def _window_gradient_bytes(self, window: Window) -> int:
        return sum(
            aligned(piece.numel * 4, EXTENT_ALIGNMENT)
            for piece in window.pieces
            if self.params[piece.param].has_master
        )

    def _window_update_bytes(self, window: Window) -> int:
        batched = sequential = first = 0
        for piece in window.pieces:
            spec = self.params[piece.param]
            share = min(piece.numel, spec.max_tile) / max(1, spec.numel)
            temporary = math.ceil(spec.temporary_bytes * share)
            if spec.temporaries is Temporaries.BATCHED:
                batched += temporary
            else:
                sequential = max(sequential, temporary)
            first = max(first, math.ceil(spec.first_bytes * share))
        return max(batched + sequential, first)


def parse_window_bytes(window_bytes: int) -> int:
    """Return the window size if it is one; ConfigError otherwise (0 never means "everything")."""
    if window_bytes < MIN_WINDOW_BYTES:
        raise ConfigError(
            f"window={window_bytes} bytes is too small; give at least "
            f'{format_bytes(MIN_WINDOW_BYTES)} ("256MiB" is the default)'
        )
    return window_bytes


def aligned(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not less than `value`."""
    return -(-value // alignment) * alignment


def _windows(params: Sequence[ParamSpec], first: int, window_bytes: int) -> Iterator[Window]:
    builder = _WindowBuilder(window_bytes)
    for index, spec in enumerate(params, first):
        yield from builder.add(index, spec)
    yield from builder.finish()


class _WindowBuilder:
    """Fills one window at a time."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.pieces: list[Piece] = []
        self.end = 0
        self.device = ""

    def add(self, index: int, spec: ParamSpec) -> Iterator[Window]:
        """Place a parameter; yield the windows that are full now."""
        if spec.device != self.device:
            yield from self.finish()
        self.device = spec.device
        if spec.elementwise:
            yield from self._add_slices(index, spec)
        else:
            if self.pieces and self.end + spec.state_bytes > self.window_bytes:
                yield from self.finish()
            self._place(index, spec, 0, spec.numel, whole=True)

    def finish(self) -> Iterator[Window]:
        if self.pieces:
            yield Window(tuple(self.pieces), aligned(self.end, PAGE_BYTES), self.device)
        self.pieces, self.end = [], 0

    def _add_slices(self, index: int, spec: ParamSpec) -> Iterator[Window]:
        start = 0
        while True:
            stop = start + self._room(spec, start)
            if stop < min(start + SLICE_ALIGNMENT, spec.numel) and self.pieces:
                yield from self.finish()
                continue
            stop = max(stop, min(start + SLICE_ALIGNMENT, spec.numel))
            self._place(index, spec, start, stop, whole=False)
            start = stop
            if start >= spec.numel:
                return

    def _room(self, spec: ParamSpec, start: int) -> int:
        """Return how many elements from `start` fit: all, or a multiple of SLICE_ALIGNMENT."""
        rest = spec.numel - start
        if self._end_with(spec, start, spec.numel) <= self.window_bytes:
            return rest
        element_bytes = sum(state.dtype.itemsize for state in spec.states)
        free = max(0, self.window_bytes - aligned(self.end, PAGE_BYTES)) // element_bytes
        return free // SLICE_ALIGNMENT * SLICE_ALIGNMENT

    def _end_with(self, spec: ParamSpec, start: int, stop: int) -> int:
        """Return where the window would end with these elements of a parameter."""
        alignment = _alignment(spec, start, stop)
        end = self.end
        for state in spec.states:
            end = aligned(end, alignment) + (stop - start) * state.dtype.itemsize
        return end

    def _place(self, index: int, spec: ParamSpec, start: int, stop: int, whole: bool) -> None:
        alignment = _alignment(spec, start, stop)
        extents = []
        for state in spec.states:
            shape, stride = (state.shape, state.stride) if whole else ((stop - start,), (1,))
            num_bytes = math.prod(shape) * state.dtype.itemsize
            offset = aligned(self.end, alignment)
            extents.append(Extent(state.key, shape, stride, state.dtype, offset, num_bytes))
            self.end = offset + num_bytes
        self.pieces.append(Piece(index, start, stop, whole, tuple(extents)))


def _alignment(spec: ParamSpec, start: int, stop: int) -> int:
    """Return where extents may start; slices on pages, so that a whole can be mapped from them."""
    return EXTENT_ALIGNMENT if stop - start == spec.numel else PAGE_BYTES


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
