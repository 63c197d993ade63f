"""Some of a window's bytes, to look at."""

from __future__ import annotations

import torch
from torch import Tensor

from optstream.plan import aligned
from optstream.store.base import PIECE_BYTES, Store
from optstream.stream.slots import allocate


def read_part(store: Store, window: int, offset: int, num_bytes: int) -> Tensor:
    """Return a copy of some of a window's bytes, as the store has them."""
    # whole pieces: what comes from a checkpoint is held against their digests
    first = offset // PIECE_BYTES * PIECE_BYTES
    end = min(aligned(offset + num_bytes, PIECE_BYTES), store.file(window).data_bytes)
    copy = allocate(min(end - first, PIECE_BYTES))
    found = torch.empty(num_bytes, dtype=torch.uint8)
    for start in range(first, end, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, end)
        store.read(window, start, copy.memory[: stop - start])
        low, high = max(start, offset), min(stop, offset + num_bytes)
        found[low - offset : high - offset] = copy.tensor[low - start : high - start]
    return found
