"""Which tensors go in which window, and what that costs: arithmetic, no I/O."""

from optstream.plan.plan import (
    MIN_WINDOW_BYTES,
    NUM_DEVICE_BUFFERS,
    NUM_SLOTS,
    OVERHEAD_BYTES,
    Plan,
    parse_window_bytes,
)
from optstream.plan.specs import MASTER, MAX_TILE, ParamSpec, StateTensor, Temporaries
from optstream.plan.windows import (
    EXTENT_ALIGNMENT,
    PAGE_BYTES,
    SLICE_ALIGNMENT,
    Extent,
    Piece,
    Window,
    aligned,
)

__all__ = [
    "EXTENT_ALIGNMENT",
    "MASTER",
    "MAX_TILE",
    "MIN_WINDOW_BYTES",
    "NUM_DEVICE_BUFFERS",
    "NUM_SLOTS",
    "OVERHEAD_BYTES",
    "PAGE_BYTES",
    "SLICE_ALIGNMENT",
    "Extent",
    "ParamSpec",
    "Piece",
    "Plan",
    "StateTensor",
    "Temporaries",
    "Window",
    "aligned",
    "parse_window_bytes",
]
