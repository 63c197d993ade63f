"""The window files of a plan: each extent named and described for any safetensors reader."""

from __future__ import annotations

from typing import Any

from optstream.codecs import CODECS, EXACT
from optstream.format import TensorRecord, build_header, dtype_name
from optstream.plan import Extent, Piece, Plan, Window
from optstream.store.base import WindowFile


def window_files(plan: Plan, first: int = 0) -> list[WindowFile]:
    """Return what a store must hold for the windows from `first` on."""
    return [_window_file(plan, window) for window in plan.windows[first:]]


def _window_file(plan: Plan, window: Window) -> WindowFile:
    records = [_record(plan, piece, extent) for piece in window.pieces for extent in piece.extents]
    return WindowFile(build_header(records, window.data_bytes), window.data_bytes)


def _record(plan: Plan, piece: Piece, extent: Extent) -> TensorRecord:
    spec = plan.params[piece.param]
    whole = next(state for state in spec.states if state.key == extent.key)
    return TensorRecord(
        fqn=spec.name,
        key=extent.key,
        dtype=dtype_name(extent.dtype),
        shape=extent.shape,
        global_shape=whole.shape,
        start=piece.start,
        offset=extent.offset,
        stride=None if _is_row_major(extent) else extent.stride,
        codec=extent.codec,
        **_stored_as(extent),
    )


def _stored_as(extent: Extent) -> dict[str, Any]:
    """Return what a reader that knows no codecs sees of encoded values."""
    if extent.codec == EXACT:
        return {}
    dtype = CODECS[extent.codec].reader_dtype
    return {
        "stored_dtype": dtype_name(dtype),
        "stored_numel": extent.num_bytes // dtype.itemsize,
    }


def _is_row_major(extent: Extent) -> bool:
    expected = 1
    for size, stride in zip(reversed(extent.shape), reversed(extent.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True
