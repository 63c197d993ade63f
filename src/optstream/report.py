"""What a step really did: the StepReport, one log line, one JSON line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from optstream.errors import ConfigError
from optstream.memory import MemoryMeter, MemoryRecord
from optstream.units import format_bytes

log = logging.getLogger("optstream")


@dataclass(frozen=True, kw_only=True)
class StepReport(MemoryRecord):
    """Measured figures of one step; those of memory are of its end.

    Bytes count when their transfer is through: the last writes of a step drain behind the next
    forward and count in the next step's report, so the sum over steps is exact and a single report
    may differ from `plan` by the windows in flight.

    Attributes:
        step: 1 for the first step after wrapping.
        rank: of this process.
        num_windows: windows updated; those without gradients are not.
        read_bytes, written_bytes: moved from and to the drive since the last report.
        saved_bytes: those of written_bytes that a save or `state_dict` wrote: resident windows.
        resident_bytes: of windows that stay in memory between steps.
        read_wait_s, write_wait_s: time in which `step()` did nothing but wait for a read, a write.
        update_s: time in the optimizer's own step, casts and copies to the parameters (host side).
        exchanged_bytes: parameters' bytes sent to and taken from other ranks.
        exchange_wait_s: time in which `step()` did nothing but wait for other ranks.
        total_s: time in `step()`.
    """

    step: int
    rank: int
    num_windows: int
    read_bytes: int
    written_bytes: int
    saved_bytes: int
    resident_bytes: int
    read_wait_s: float
    write_wait_s: float
    update_s: float
    exchanged_bytes: int
    exchange_wait_s: float
    total_s: float

    def __str__(self) -> str:
        ranks = f", for ranks {self.exchange_wait_s:.3f}" if self.exchanged_bytes else ""
        saved = f" ({format_bytes(self.saved_bytes)} by a save)" if self.saved_bytes else ""
        return (
            f"step {self.step}: {self.num_windows} windows, read {format_bytes(self.read_bytes)}, "
            f"written {format_bytes(self.written_bytes)}{saved}, "
            f"resident {format_bytes(self.resident_bytes)}, {self.total_s:.3f} s "
            f"(update {self.update_s:.3f}, waiting for reads {self.read_wait_s:.3f}, "
            f"for writes {self.write_wait_s:.3f}{ranks}), {self.describe_memory()}"
        )


def process_rank() -> int:
    """Return this process's rank in the default process group, or 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def metrics_path(metrics: str | os.PathLike[str], rank: int, num_ranks: int) -> Path:
    """Return the file of one of several ranks: `run.rank00000.jsonl` for `run.jsonl`."""
    path = Path(metrics)
    if num_ranks == 1:
        return path
    return path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")


class Reporter:
    """Makes the reports of one optimizer; counts from one step's end to the next's."""

    def __init__(
        self, name: str, rank: int, num_ranks: int, metrics: str | os.PathLike[str] | None
    ) -> None:
        """Open the JSONL file, if any, for appending.

        Args:
            name: of the wrapped optimizer's class, for the log line.
            metrics: of all ranks; see `metrics_path`.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._name = name
        self._rank = rank
        self._steps = 0
        self._totals: dict[str, float] = {}
        self._memory = MemoryMeter()
        self._file: IO[str] | None = None
        self._made: Path | None = None
        if metrics is not None:
            try:
                path = metrics_path(metrics, rank, num_ranks).absolute()
                self._made = None if path.exists() else path
                self._file = path.open("a", encoding="utf-8")
            except (OSError, TypeError, ValueError) as error:
                cause = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(
                    f"cannot write metrics to {metrics!s}: {cause}; "
                    "give a file in an existing, writable folder"
                ) from error

    @property
    def next_step(self) -> int:
        return self._steps + 1

    def resume(self, steps: int) -> None:
        """Count on from a checkpoint."""
        self._steps = steps

    def report(
        self, num_windows: int, resident_bytes: int, totals: Mapping[str, float]
    ) -> StepReport:
        """Return the report of a step that just ended, and log it.

        Args:
            totals: running totals of the StepReport fields that are counted.
        """
        self._steps += 1
        counted = {key: value - self._totals.get(key, 0) for key, value in totals.items()}
        self._totals = dict(totals)
        report = StepReport(
            step=self._steps,
            rank=self._rank,
            num_windows=num_windows,
            resident_bytes=resident_bytes,
            **dataclasses.asdict(self._memory.read()),
            **counted,  # type: ignore[arg-type]
        )
        log.info("%s on rank %d, %s", self._name, self._rank, report)
        self._write_line(report)
        return report

    def _write_line(self, report: StepReport) -> None:
        if self._file is None:
            return
        try:
            print(json.dumps(dataclasses.asdict(report)), file=self._file, flush=True)
        except OSError as error:
            # the step is done and its report is at hand; training does not end for a line
            log.warning("no more metrics are written to %s: %s", self._file.name, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file; one that was made here and got no line is removed."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full drive, of which `_write_line` told
            self._file.close()
        self._file = None
        with contextlib.suppress(OSError):
            if self._made is not None and self._made.stat().st_size == 0:
                self._made.unlink()
