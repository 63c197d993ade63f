"""What a run has measured: a record a step, and their sum."""

from __future__ import annotations

from dataclasses import dataclass

from optstream.memory import MemoryRecord
from optstream.training.config import TrainConfig
from optstream.training.optimizers import Rates
from optstream.training.updater import StepCost


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What is about to run, known before the first step."""

    config: TrainConfig
    rates: Rates
    """Peak learning rates."""
    first_step: int
    """Steps done before this run, by the run it resumes."""
    num_params: int
    num_windows: int
    """Files the state is in; 0 with the plain optimizer."""
    state_bytes: int
    """State in the store; 0 with the plain optimizer, whose state does not exist yet."""
    resident_bytes: int
    """Of the state, what stays in memory between steps; 0 with the plain optimizer."""
    peak_host_bytes: int
    """Most host memory the streamed optimizer takes."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(MemoryRecord):
    """One step as measured; a line of the metrics file. Memory is that after the step."""

    step: int
    """Counted from 1."""
    loss: float
    """Training loss of this step's batch, before its update; nats a token."""
    lr: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    total_s: float
    optimizer_s: float
    save_s: float
    """Of a checkpoint after the step; 0 without one."""
    read_wait_s: float
    write_wait_s: float
    exchange_wait_s: float
    """In which the update did nothing but wait for other ranks; 0 in one process."""
    read_bytes: int
    written_bytes: int


class Totals:
    """Sums over the steps that were done, and the drain behind the last one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.total_s = 0.0
        self.optimizer_s = 0.0
        self.save_s = 0.0
        self.wait_s = 0.0
        self.exchange_wait_s = 0.0
        self.read_bytes = 0
        self.written_bytes = 0
        self.peak_anon_bytes = 0
        self.last: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_tokens += record.num_tokens
        self.total_s += record.total_s
        self.optimizer_s += record.optimizer_s
        self.save_s += record.save_s
        self.wait_s += record.read_wait_s + record.write_wait_s
        self.exchange_wait_s += record.exchange_wait_s
        self.read_bytes += record.read_bytes
        self.written_bytes += record.written_bytes
        self.peak_anon_bytes = max(self.peak_anon_bytes, record.anon_bytes)
        self.last = record

    def add_drain(self, cost: StepCost) -> None:
        """Count the writes that were under way after the last step, and the wait for them."""
        self.total_s += cost.write_wait_s
        self.optimizer_s += cost.write_wait_s
        self.wait_s += cost.write_wait_s
        self.read_bytes += cost.read_bytes
        self.written_bytes += cost.written_bytes


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished or stopped run."""

    plan: RunPlan
    totals: Totals
    loss_before: float
    """Held-out loss, nats a token."""
    loss_after: float | None
    """None when a signal ended the run: it is not measured then."""
    state_bytes: int
    """State after the last step, masters included."""
    num_saved: int
    """Checkpoints made."""
    stopped_by: int | None
    """Number of the signal that ended the run."""
