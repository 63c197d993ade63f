"""The table at the end of a run."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from optstream.training.progress import describe_optimizer, describe_place
from optstream.training.result import RunResult, Totals
from optstream.training.spread import spread_table
from optstream.units import format_bytes

_WIDTH = 110


def print_summary(runs: Sequence[Sequence[RunResult]]) -> None:
    """Print what runs have measured, a column a run, on standard output.

    Args:
        runs: each as its ranks saw it; the column is that of rank 0.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    results = [ranks[0] for ranks in runs]
    table = Table(title="optstream train", show_header=len(results) > 1)
    table.add_column("")
    for result in results:
        table.add_column(result.plan.config.optimizer)
    columns = [_rows(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *[column.get(name, "") for column in columns])
    console.print(table, highlight=False)
    for ranks in runs:
        if len(ranks) > 1 and ranks[0].totals.num_steps:
            console.print(spread_table(ranks), highlight=False)


def _rows(result: RunResult) -> dict[str, str]:
    plan, totals = result.plan, result.totals
    model = f"{plan.config.model}, {plan.num_params / 1e6:.1f} M parameters, {plan.config.dtype}"
    steps = f"{totals.num_steps} of {plan.config.steps}, {totals.num_tokens:,} tokens"
    if plan.first_step:
        steps += f", after {plan.first_step} of an earlier run"
    if result.stopped_by is not None:
        steps += f", stopped by {signal.Signals(result.stopped_by).name}"
    return {
        "model": model,
        "optimizer": describe_optimizer(plan),
        "optimizer state": describe_place(plan),
        "steps": f"{steps}, {totals.total_s:.1f} s",
        "held-out loss": _held_out(result),
        "last training loss": f"{totals.last.loss:.4f}" if totals.last else "no step was done",
        **(_step_rows(result) if totals.num_steps else {}),
    }


def _held_out(result: RunResult) -> str:
    before = f"{result.loss_before:.4f} before"
    if result.loss_after is None:
        return f"{before}, not measured after (stopped)"
    return f"{before}, {result.loss_after:.4f} after"


def _step_rows(result: RunResult) -> dict[str, str]:
    totals = result.totals
    num, total_s = totals.num_steps, totals.total_s
    return {
        "time a step": f"{total_s / num * 1e3:.0f} ms",
        "  of it optimizer": _share(totals.optimizer_s, totals),
        "  of it waiting for the drive": _share(totals.wait_s, totals),
        **({"  of it saving": _saving(result)} if result.num_saved else {}),
        "tokens a second": f"{totals.num_tokens / total_s:,.0f}",
        **_drive_rows(result),
        "anonymous memory": _memory(result),
    }


def _share(seconds: float, totals: Totals) -> str:
    return f"{seconds / totals.num_steps * 1e3:.1f} ms, {seconds / totals.total_s:.1%}"


def _saving(result: RunResult) -> str:
    plural = "" if result.num_saved == 1 else "s"
    each_s = result.totals.save_s / result.num_saved
    return (
        f"{_share(result.totals.save_s, result.totals)}: {result.num_saved} checkpoint{plural} of "
        f"{each_s * 1e3:.0f} ms in {result.plan.config.save_dir}"
    )


def _drive_rows(result: RunResult) -> dict[str, str]:
    totals = result.totals
    if result.plan.config.store in ("none", "memory"):
        return {"on the drive": "nothing: the state is in memory"}
    moved = totals.read_bytes + totals.written_bytes
    return {
        "on the drive": f"{format_bytes(result.state_bytes)}, {_fate(result)}",
        "moved a step": (
            f"{format_bytes(totals.read_bytes / totals.num_steps)} read, "
            f"{format_bytes(totals.written_bytes / totals.num_steps)} written "
            f"({moved / totals.total_s / 1e9:.2f} GB/s over all steps)"
        ),
    }


def _fate(result: RunResult) -> str:
    return "kept in the checkpoints" if result.num_saved else "removed at the end"


def _memory(result: RunResult) -> str:
    last = result.totals.last
    assert last is not None, "rows about steps need a step"
    now = f"{format_bytes(last.anon_bytes)} now"
    state = format_bytes(result.state_bytes)
    if result.plan.config.store in ("none", "memory"):
        return f"{now}, of it {state} optimizer state"
    buffers = format_bytes(result.plan.peak_host_bytes)
    text = f"{now}, of it at most {buffers} for the state, which would take {state} in memory"
    if result.plan.peak_host_bytes >= result.state_bytes:
        text += "; nothing is saved with a state this small, or a --window or --ram this large"
    return text
