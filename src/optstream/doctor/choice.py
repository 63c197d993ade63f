"""Which of several directories to give `offload`: all, those on drives of their own, or one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optstream.doctor.report import DirectoryReport


@dataclass(frozen=True)
class Choice:
    """What to give `offload`.

    Attributes:
        directories: windows are striped over them evenly.
        bytes_per_s: what a step moves there, reads and writes together; None: not measured.
        free_bytes: how much state has room.
        window_bytes, io_threads: as in Settings; io_threads are for each drive.
        reasons: why these.
    """

    directories: tuple[str, ...]
    bytes_per_s: float | None
    free_bytes: int
    window_bytes: int
    io_threads: int
    reasons: tuple[str, ...]


def choose(reports: Sequence[DirectoryReport]) -> Choice | None:
    """Return the best use of these directories; None where none is usable."""
    usable = [report for report in reports if report.usable]
    if not usable:
        return None
    apart, reasons = _on_own_drives(usable)
    together, best = _rate(apart), max(apart, key=lambda report: _rate([report]) or 0)
    alone = _rate([best])
    if together is None or alone is None or len(apart) == 1:
        return _choice(apart, reasons)
    if together > alone:
        text = f"the fastest alone moves {alone / 1e9:.2f} GB/s, all {together / 1e9:.2f}"
        return _choice(apart, [*reasons, f"{text}: the slowest sets the pace"])
    text = f"striped over all, the slowest would set the pace: {together / 1e9:.2f} GB/s"
    return _choice([best], [*reasons, f"{text}, {best.path} alone moves {alone / 1e9:.2f}"])


def _choice(reports: Sequence[DirectoryReport], reasons: Sequence[str]) -> Choice:
    settings = [report.settings for report in reports if report.settings]
    return Choice(
        directories=tuple(report.path for report in reports),
        bytes_per_s=_rate(reports),
        free_bytes=len(reports) * min(_free_bytes(report) for report in reports),
        window_bytes=min(found.window_bytes for found in settings),
        io_threads=max(found.io_threads for found in settings),
        reasons=tuple(reasons),
    )


def _on_own_drives(
    reports: Sequence[DirectoryReport],
) -> tuple[list[DirectoryReport], list[str]]:
    """Return the directories that share no drive with one before them, and what was left out."""
    apart: list[DirectoryReport] = []
    reasons = []
    for report in reports:
        names = {disk.name for disk in report.disks}
        for other in apart:
            common = names & {disk.name for disk in other.disks}
            if common:
                reasons.append(
                    f"{report.path} is on {min(common)} as {other.path} is: striping over both "
                    "gains nothing"
                )
                break
        else:
            apart.append(report)
    return apart, reasons


def _rate(reports: Sequence[DirectoryReport]) -> float | None:
    """Return bytes/s of windows striped evenly: each gets as many, so the slowest sets the pace."""
    rates = [report.settings.bytes_per_s if report.settings else None for report in reports]
    known = [rate for rate in rates if rate is not None]
    return len(known) * min(known) if len(known) == len(rates) else None


def _free_bytes(report: DirectoryReport) -> int:
    return report.filesystem.free_bytes if report.filesystem else 0
