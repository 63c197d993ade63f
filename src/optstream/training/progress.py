"""Progress of a run on standard error: a bar on a terminal, short lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from optstream.training.result import RunPlan, StepRecord
from optstream.training.run import Observer
from optstream.units import format_bytes

_NUM_LINES = 10


class Silent:
    """Shows nothing."""

    def preparing(self, what: str) -> None:
        pass

    def started(self, plan: RunPlan) -> None:
        pass

    def stepped(self, record: StepRecord) -> None:
        pass

    def finished(self) -> None:
        pass


class Lines:
    """About ten lines a run, for a log file."""

    def __init__(self) -> None:
        self._every = self._first = 1
        self._num_steps = 0

    def preparing(self, what: str) -> None:
        _print(what)

    def started(self, plan: RunPlan) -> None:
        self._num_steps = plan.config.steps
        self._first = plan.first_step + 1
        self._every = max(1, self._num_steps // _NUM_LINES)
        _print(describe(plan))

    def stepped(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step in (self._first, self._num_steps):
            _print(f"step {record.step}/{self._num_steps}: {_measures(record)}")

    def finished(self) -> None:
        pass


class Bar:
    """One line that is redrawn."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[measures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("step", visible=False, measures="")

    def preparing(self, what: str) -> None:
        _print(what)

    def started(self, plan: RunPlan) -> None:
        _print(describe(plan))
        self._progress.reset(
            self._task, total=plan.config.steps, completed=plan.first_step, visible=True
        )
        self._progress.start()

    def stepped(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, measures=_measures(record))

    def finished(self) -> None:
        self._progress.stop()


def make_observer(*, quiet: bool) -> Observer:
    """Return what suits standard error: nothing if asked, a bar on a terminal, else lines."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


def describe(plan: RunPlan) -> str:
    """Return one line: what runs, where its state is, and what that costs."""
    config = plan.config
    what = (
        f"{config.model}, {plan.num_params / 1e6:.1f} M parameters in {config.dtype}, "
        f"{describe_optimizer(plan)}, {config.steps} steps of "
        f"{config.batch_size} x {config.seq_len} tokens"
    )
    return f"{what}; state {describe_place(plan)}"


def describe_optimizer(plan: RunPlan) -> str:
    """Return which optimizer runs, and its peak learning rates."""
    name, rates = plan.config.optimizer, plan.rates
    if name == "muon":
        return f"muon, lr {rates.lr:g}; the AdamW part, lr {rates.adamw_lr:g}"
    return f"{name}, lr {rates.lr:g}"


def describe_place(plan: RunPlan) -> str:
    """Return where the optimizer's state is, in words."""
    config = plan.config
    if config.store == "none":
        return "in memory, the plain optimizer (--store none)"
    plural = "" if plan.num_windows == 1 else "s"
    windows = f"{format_bytes(plan.state_bytes)} in {plan.num_windows} window{plural}"
    if config.store == "memory":
        return f"{windows}, in memory (--store memory)"
    resident = ""
    if plan.resident_bytes:
        resident = f"{format_bytes(plan.resident_bytes)} of it resident in memory, "
    if config.store == "mapped":
        return (
            f"{windows} in files at {config.state_dir} and their page cache (--store mapped), "
            f"{resident}other memory for it at most {format_bytes(plan.peak_host_bytes)}"
        )
    return (
        f"{windows} on the drive at {config.state_dir} (--store {config.store}), {resident}"
        f"host buffers at most {format_bytes(plan.peak_host_bytes)}"
    )


def _measures(record: StepRecord) -> str:
    moved = record.read_bytes + record.written_bytes
    # over the whole step: reads ahead and the last writes run beside forward and backward
    drive = f", drive {moved / record.total_s / 1e9:.2f} GB/s" if moved else ""
    drive += f", saved in {record.save_s * 1e3:.0f} ms" if record.save_s else ""
    return (
        f"loss {record.loss:.3f}, {record.num_tokens / record.total_s:,.0f} tokens/s{drive}, "
        f"{record.describe_memory()}"
    )


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
