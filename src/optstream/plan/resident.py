"""Which windows stay in memory between steps, within a budget.

A scan that repeats defeats a cache of what was used last (0 % hits where it is smaller than the
scan); a fixed set hits its share of every scan. A window that is not in it costs two reads and two
writes in two steps, less one read for each end of the alternating scan at which it is kept in a
slot. Keeping a window from there resident lets another one into that slot, so at the ends small
windows are the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_SUMS = 256
_MAX_WORK = 10**6
_GOLDEN = 0.618033988749895

Chain = tuple[int, "Chain"] | None
"""Chosen windows: the last one, and those before it."""


def choose_resident(sizes: Sequence[int], num_slots: int, budget_bytes: int) -> set[int]:
    """Return the windows that save the most traffic within a budget.

    A knapsack, solved by sums of sizes: of those that share one of a few hundred buckets the best
    is kept. Windows are tried in an order that spreads equal ones evenly over the scan, so that the
    drive has work throughout (tests/unit/test_resident.py: near the best of all choices).

    Args:
        sizes: of the windows, in the order of the scan.
        num_slots: windows that wait in slots for the scan to turn.
        budget_bytes: of memory.
    """
    if sum(sizes) <= budget_bytes:
        return set(range(len(sizes)))
    if budget_bytes <= 0:
        return set()
    num_sums = max(1, min(_MAX_SUMS, _MAX_WORK // len(sizes)))
    values = _saved_bytes(sizes, num_slots)
    best: dict[int, tuple[float, int, Chain]] = {0: (0, 0, None)}
    for window in sorted(range(len(sizes)), key=lambda window: window * _GOLDEN % 1):
        for value, num_bytes, chosen in list(best.values()):
            value, num_bytes = value + values[window], num_bytes + sizes[window]
            bucket = -(-num_bytes * num_sums // budget_bytes)  # nothing has one of its own
            if num_bytes <= budget_bytes and value > best.get(bucket, (0,))[0]:
                best[bucket] = value, num_bytes, (window, chosen)
    _, _, chain = max(best.values(), key=lambda found: found[0])
    return set(_unchained(chain))


def _saved_bytes(sizes: Sequence[int], num_slots: int) -> list[float]:
    """Return what each window saves in two steps, if one that it lets into a slot is usual."""
    usual, end = sum(sizes) / len(sizes), len(sizes) - num_slots
    ends = [(window < num_slots) + (window >= end) for window in range(len(sizes))]
    return [4 * size + (usual - size) * num for size, num in zip(sizes, ends, strict=True)]


def _unchained(chain: Chain) -> list[int]:
    windows = []
    while chain is not None:
        window, chain = chain
        windows.append(window)
    return windows
