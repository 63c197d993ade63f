"""Masters follow weights that something else has written: a load, a merge, an average."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from optstream.plan import MAX_TILE


def follow_parameter(master: Tensor, param: Tensor) -> Tensor:
    """Take into the master what something else wrote into its parameter.

    Where the parameter still is the master's rounded value the master keeps its lower bits, so a
    weight that was swapped out and back (EMA, evaluation) loses nothing.

    Returns:
        Whether there was any (0-dim, bool); on an accelerator nothing has waited for it.
    """
    changed = torch.zeros((), dtype=torch.bool, device=master.device)
    for part, written in _chunks(master, param):
        differs = written.view(torch.int16) != part.to(param.dtype).view(torch.int16)
        any_differs = differs.any()
        if not differs.is_cpu or bool(any_differs):
            part.copy_(torch.where(differs, written.to(master.dtype), part))
            changed |= any_differs
    return changed


def _chunks(master: Tensor, param: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield bounded parts of both: flat where both are contiguous, else some rows."""
    if master.is_contiguous() and param.is_contiguous():
        master, param = master.view(-1), param.view(-1)
    rows = max(1, MAX_TILE * len(param) // max(1, param.numel()))
    yield from zip(master.split(rows), param.split(rows), strict=True)
