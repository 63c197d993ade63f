"""Parameters into windows: who lies where, byte by byte.

Parameters are taken in order until a window holds `window_bytes` of stored state. A rule that is
elementwise gets flat slices, so that one huge parameter does not break the bound; any other rule
gets whole parameters.

Parameters that ranks update together have windows of their own, the first ones. These end where
they would end with the largest parts, so that all ranks have as many and the same parameters in
each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from optstream.codecs import EXACT
from optstream.plan.specs import EXTENT_ALIGNMENT, ParamSpec, stored_bytes
from optstream.units import PAGE_BYTES, aligned

SLICE_ALIGNMENT = 4096
"""Elements. Vectorised kernels give the same bits for a slice as for the whole when slices start at
multiples of this (tests/parity/test_slices.py)."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The byte range of a window's data that holds one tensor (of a slice).

    Attributes:
        shape, stride, dtype: of the values.
        codec: the name of how they are stored.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    codec: str = EXACT

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Window:
    """The pieces whose state is in memory together.

    Attributes:
        pieces: in the order of their extents.
        data_bytes: size on the drive behind the header, a multiple of PAGE_BYTES.
        device: where all its parameters live.
        gathered: all ranks update it together.
    """

    pieces: tuple[Piece, ...]
    data_bytes: int
    device: str
    gathered: bool = False

    @property
    def state_bytes(self) -> int:
        return sum(extent.num_bytes for piece in self.pieces for extent in piece.extents)


def build_windows(params: Sequence[ParamSpec], first: int, window_bytes: int) -> Iterator[Window]:
    """Yield the windows of parameters whose indices start at `first`."""
    for gathered in (True, False):
        builder = _WindowBuilder(window_bytes, gathered)
        for index, spec in enumerate(params, first):
            if (spec.gathered is not None) == gathered:
                yield from builder.add(index, spec)
        yield from builder.finish()


class _WindowBuilder:
    """Fills one window at a time.

    Attributes:
        end: bytes of it that are taken.
        largest_end: of parameters that ranks update together: bytes with the largest parts.
    """

    def __init__(self, window_bytes: int, gathered: bool) -> None:
        self.window_bytes = window_bytes
        self.gathered = gathered
        self.pieces: list[Piece] = []
        self.end = self.largest_end = 0
        self.device = ""

    def add(self, index: int, spec: ParamSpec) -> Iterator[Window]:
        """Place a parameter; yield the windows that are full now."""
        if spec.device != self.device:
            yield from self.finish()
        self.device = spec.device
        if spec.elementwise:
            yield from self._add_slices(index, spec)
        elif self.gathered:
            if self.pieces and self.largest_end + spec.largest_part_bytes > self.window_bytes:
                yield from self.finish()
            self.largest_end += spec.largest_part_bytes
            self._place(index, spec, 0, spec.numel, whole=True)
        else:
            if self.pieces and self.end + spec.state_bytes > self.window_bytes:
                yield from self.finish()
            self._place(index, spec, 0, spec.numel, whole=True)

    def finish(self) -> Iterator[Window]:
        if self.pieces:
            # a rank whose parts are all empty has a window all the same
            data_bytes = aligned(max(1, self.end), PAGE_BYTES)
            yield Window(tuple(self.pieces), data_bytes, self.device, self.gathered)
        self.pieces, self.end, self.largest_end = [], 0, 0

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
        if not spec.states or self._end_with(spec, start, spec.numel) <= self.window_bytes:
            return rest
        least_bytes = sum(
            stored_bytes(state.codec, SLICE_ALIGNMENT, state.dtype) for state in spec.states
        )
        free_bytes = self.window_bytes - aligned(self.end, PAGE_BYTES)
        room = max(0, free_bytes) // least_bytes * SLICE_ALIGNMENT
        # the parts of encoded values are padded once, not once per SLICE_ALIGNMENT
        while self._end_with(spec, start, start + room + SLICE_ALIGNMENT) <= self.window_bytes:
            room += SLICE_ALIGNMENT
        return room

    def _end_with(self, spec: ParamSpec, start: int, stop: int) -> int:
        """Return where the window would end with these elements of a parameter."""
        alignment = _alignment(spec, start, stop)
        end = self.end
        for state in spec.states:
            end = aligned(end, alignment) + stored_bytes(state.codec, stop - start, state.dtype)
        return end

    def _place(self, index: int, spec: ParamSpec, start: int, stop: int, whole: bool) -> None:
        alignment = _alignment(spec, start, stop)
        extents = []
        flat = (stop - start,)
        for state in spec.states:
            shape, stride = (state.shape, state.stride) if whole else (flat, (1,))
            num_bytes = stored_bytes(state.codec, math.prod(shape), state.dtype)
            offset = aligned(self.end, alignment)
            extents.append(
                Extent(state.key, shape, stride, state.dtype, offset, num_bytes, state.codec)
            )
            self.end = offset + num_bytes
        self.pieces.append(Piece(index, start, stop, whole, tuple(extents)))


def _alignment(spec: ParamSpec, start: int, stop: int) -> int:
    """Return where extents may start; slices on pages, so that a whole can be mapped from them."""
    return EXTENT_ALIGNMENT if stop - start == spec.numel else PAGE_BYTES
