"""What ranks measured of the same run, side by side: the least, the middle and the most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from optstream.training.result import RunResult
from optstream.units import format_bytes


def spread_table(results: Sequence[RunResult]) -> Table:
    """Return a table of one run, whose results are those of its ranks."""
    table = Table(title=f"{results[0].plan.config.optimizer} on {len(results)} ranks")
    for column in ("a step, on a rank", "min", "median", "max"):
        table.add_column(column)
    for name, measure, show in _ROWS:
        values = [measure(result) for result in results]
        spread = (min(values), statistics.median(values), max(values))
        table.add_row(name, *map(show, spread))
    return table


def _a_step(total: Callable[[RunResult], float]) -> Callable[[RunResult], float]:
    return lambda result: total(result) / result.totals.num_steps


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


_ROWS: list[tuple[str, Callable[[RunResult], float], Callable[[float], str]]] = [
    ("optimizer", _a_step(lambda result: result.totals.optimizer_s), _ms),
    ("waiting for the drive", _a_step(lambda result: result.totals.wait_s), _ms),
    ("waiting for other ranks", _a_step(lambda result: result.totals.exchange_wait_s), _ms),
    ("read", _a_step(lambda result: result.totals.read_bytes), format_bytes),
    ("written", _a_step(lambda result: result.totals.written_bytes), format_bytes),
    ("state", lambda result: result.state_bytes, format_bytes),
    ("most anonymous memory", lambda result: result.totals.peak_anon_bytes, format_bytes),
]
