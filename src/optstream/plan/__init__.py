"""Which tensors go in which window, and what that costs: arithmetic, no I/O."""

from optstream.codecs import EXACT
from optstream.plan.plan import (
    FIRST_RUN_BYTES,
    MIN_WINDOW_BYTES,
    NUM_DEVICE_BUFFERS,
    NUM_SLOTS,
    OVERHEAD_BYTES,
    Plan,
    parse_window_bytes,
)
from optstream.plan.specs import (
    EXTENT_ALIGNMENT,
    MASTER,
    MAX_TILE,
    SCRATCH_ALIGNMENT,
    Gathered,
    ParamSpec,
    StateTensor,
    Temporaries,
    stored_bytes,
)
from optstream.plan.windows import (
    SLICE_ALIGNMENT,
    Extent,
    Piece,
    Window,
)
from optstream.units import aligned

__all__ = [
    "EXACT",
    "EXTENT_ALIGNMENT",
    "FIRST_RUN_BYTES",
    "MASTER",
    "MAX_TILE",
    "MIN_WINDOW_BYTES",
    "NUM_DEVICE_BUFFERS",
    "NUM_SLOTS",
    "OVERHEAD_BYTES",
    "SCRATCH_ALIGNMENT",
    "SLICE_ALIGNMENT",
    "Extent",
    "Gathered",
    "ParamSpec",
    "Piece",
    "Plan",
    "StateTensor",
    "Temporaries",
    "Window",
    "aligned",
    "parse_window_bytes",
    "stored_bytes",
]
