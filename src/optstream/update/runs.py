"""A tile, and how many of them one call of the optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from optstream.plan import FIRST_RUN_BYTES, ParamSpec, Temporaries
from optstream.update.decoding import Decoded

TRIM_BYTES = 4 * 2**20
"""Of parameters updated by rules with temporaries, after which freed memory is given back."""

MAX_RUN = 256
"""Tiles: each is some KiB of Python and torch objects, however small the parameter."""


@dataclass(eq=False, slots=True)
class Tile:
    """A tile of a piece (`start`: in the flat parameter), ready for the optimizer.

    Attributes:
        target: of the parameter.
        state: what the optimizer gets.
        views: where it is to be afterwards, by key.
        decoded: of those, what is encoded in the window.
        makes_state: the optimizer has none for it yet and makes it.
    """

    spec: ParamSpec
    param: int
    start: int
    target: Tensor
    proxy: nn.Parameter
    state: dict[str, Any]
    views: dict[str, Tensor]
    decoded: Mapping[str, Decoded]
    makes_state: bool


def batches(tiles: Iterable[Tile], *, at_once: bool = False) -> Iterator[list[Tile]]:
    """Yield what one call of the optimizer updates: MAX_RUN, TRIM_BYTES where one by one.

    Ordering: kept; a rule that batches keeps its batch, where it is fast.

    Args:
        at_once: all of them, so that every rank has a matrix to orthogonalise.
    """
    run: list[Tile] = []
    run_bytes = 0
    for tile in tiles:
        run.append(tile)
        run_bytes += tile.proxy.nbytes if tile.spec.temporaries is Temporaries.ONE else 0
        if not at_once and (run_bytes >= TRIM_BYTES or len(run) == MAX_RUN):
            yield run
            run, run_bytes = [], 0
    if run:
        yield run


def first_batches(tiles: Iterable[Tile]) -> Iterator[list[Tile]]:
    """Yield tiles that make their state: each by itself, or as many small ones as are planned for.

    Ordering: kept.
    """
    run: list[Tile] = []
    run_bytes = 0
    for tile in tiles:
        first_bytes = tile.spec.of_tile(tile.spec.first_bytes, tile.proxy.numel())
        if run and (run_bytes + first_bytes > FIRST_RUN_BYTES or len(run) == MAX_RUN):
            yield run
            run, run_bytes = [], 0
        run.append(tile)
        run_bytes += first_bytes
    if run:
        yield run
