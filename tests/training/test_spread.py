"""What ranks measured, side by side."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from optstream.training.spread import spread_table


def result(rank: int) -> SimpleNamespace:
    totals = SimpleNamespace(
        num_steps=2,
        optimizer_s=0.2 * rank,
        wait_s=0.02 * rank,
        exchange_wait_s=0.002 * rank,
        read_bytes=2048 * rank,
        written_bytes=4096 * rank,
        peak_anon_bytes=2**20 * rank,
    )
    config = SimpleNamespace(optimizer="muon")
    return SimpleNamespace(
        plan=SimpleNamespace(config=config), totals=totals, state_bytes=1024 * rank
    )


def test_a_row_has_the_least_the_middle_and_the_most_of_a_step():
    text = io.StringIO()
    table = spread_table([result(rank) for rank in (4, 1, 2)])
    Console(file=text, width=100).print(table)
    rows = [" ".join(line.replace("│", " ").split()) for line in text.getvalue().splitlines()]
    assert "muon on 3 ranks" in rows
    assert "optimizer 100.0 ms 200.0 ms 400.0 ms" in rows
    assert "waiting for other ranks 1.0 ms 2.0 ms 4.0 ms" in rows
    assert "written 2.0 KiB 4.0 KiB 8.0 KiB" in rows
    assert "most anonymous memory 1.0 MiB 2.0 MiB 4.0 MiB" in rows
