"""Look at directories as `offload` would before state is put there, and measure them.

Nothing is left behind. The measurement writes at most 1 GiB, and an eighth of what is free, into
each directory, takes 128 MiB of memory, and about 20 s on a fast drive, 40 s on a slow one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optstream.cli.bar import measuring
from optstream.cli.table import align
from optstream.training.stop import StopRequest
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.doctor.bandwidth import Bandwidth
    from optstream.doctor.choice import Choice
    from optstream.doctor.report import DirectoryReport, Limits

SUMMARY = "say whether directories can hold state, how fast, and with which settings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="a directory on a drive, as offload takes it; need not exist",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure nothing: on a drive that a run is using, both would be slower",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Examine each directory, print what was found; 0 if all are usable."""
    from optstream.doctor.choice import choose
    from optstream.doctor.report import examine, find_limits
    from optstream.store.checks import distinct

    limits = find_limits()
    reports = []
    with StopRequest():
        for path in distinct(args.directories):
            with measuring(str(path)) as progress:
                reports.append(examine(path, limits, None if args.quick else progress))
    choice = choose(reports)
    text = _json(reports, limits, choice) if args.json else _text(reports, limits, choice)
    sys.stdout.write(text + "\n")
    refusals = [report.refusal for report in reports if report.refusal]
    if refusals:
        sys.stderr.write(f"optstream: {'; '.join(refusals)}\n")
    return 1 if refusals else 0


def _json(reports: list[DirectoryReport], limits: Limits, choice: Choice | None) -> str:
    facts: dict[str, Any] = {
        "directories": [{**asdict(report), "usable": report.usable} for report in reports],
        "limits": asdict(limits),
        "use": asdict(choice) if choice else None,
    }
    return json.dumps(facts, indent=1)


def _text(reports: list[DirectoryReport], limits: Limits, choice: Choice | None) -> str:
    parts = ["\n".join(_lines(report)) for report in reports]
    parts.append("this process\n" + _indent(align(list(_limit_rows(limits)))))
    if choice:
        parts.append("use\n" + _indent("\n".join(_use(choice))))
    return "\n\n".join(parts)


def _use(choice: Choice) -> Iterator[str]:
    paths = [json.dumps(path, ensure_ascii=False) for path in choice.directories]
    where = paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"
    yield (
        f'offload(optimizer, {where}, window="{_size(choice.window_bytes)}", '
        f"io_threads={choice.io_threads})"
    )
    if choice.bytes_per_s:
        yield f"a step then takes {2 * 2**30 / choice.bytes_per_s:.2f} s for each GiB of state"
    yield from choice.reasons


def _lines(report: DirectoryReport) -> Iterator[str]:
    yield f"{report.path}: {'usable' if report.usable else 'not usable'}"
    if report.refusal:
        yield _indent(report.refusal)
    yield _indent(align(list(_fact_rows(report))))
    if report.bandwidth:
        yield "  measured, GB/s"
        yield _indent(align(list(_bandwidth_rows(report.bandwidth))), 4)
    if report.conduct:
        yield "  offload would"
        yield _indent("\n".join(report.conduct), 4)
    if report.settings:
        yield "  settings"
        yield _indent("\n".join(report.settings.reasons), 4)
    for warning in report.warnings:
        yield f"  warning: {warning}"


def _fact_rows(report: DirectoryReport) -> Iterator[tuple[str, str]]:
    if report.tested != report.path:
        yield "looked at", f"{report.tested}, in which offload would make it"
    if report.filesystem:
        place = report.filesystem
        files = "" if place.free_files is None else f", {place.free_files} files"
        yield "filesystem", f"{place.kind} on {place.source}, mounted at {place.point}"
        yield "free", format_bytes(place.free_bytes) + files
    for disk in report.disks:
        model = f" {disk.model}" if disk.model else ""
        spins = ", says that it rotates" if disk.rotational else ""
        size = f"{format_bytes(disk.size_bytes)}, sectors of {disk.sector_bytes} bytes{spins}"
        yield "drive", f"{disk.name}{model}, {size}"
    if report.abilities:
        able = report.abilities
        yield "O_DIRECT", _yes(able.direct_io)
        yield "fallocate", _yes(able.reserves)
        yield "nameless files", _yes(able.nameless)
        yield "links", _yes(able.links)
        yield "reflink", "not tried" if able.reflinks is None else _yes(able.reflinks)


def _bandwidth_rows(bandwidth: Bandwidth) -> Iterator[tuple[str, ...]]:
    from optstream.doctor.bandwidth import MODES, PIECES_BYTES, THREADS

    yield ("", "pieces of", *(f"{n} thread{'s' if n > 1 else ''}" for n in THREADS))
    for mode in MODES:
        for piece_bytes in PIECES_BYTES:
            rates = [bandwidth.rate(mode, piece_bytes, num_threads) for num_threads in THREADS]
            yield (mode, _size(piece_bytes), *(f"{r / 1e9:.2f}" if r else "-" for r in rates))
    yield (
        "first write",
        _size(8 * 2**20),
        *("", "", f"{bandwidth.first_write_bytes_per_s / 1e9:.2f}", ""),
    )


def _limit_rows(limits: Limits) -> Iterator[tuple[str, str]]:
    limit = limits.memory_limit_bytes
    yield "memory it may still use", format_bytes(limits.available_bytes)
    yield "memory limit", "none" if limit is None else format_bytes(limit)
    yield (
        "open files, one a window",
        "no limit" if limits.open_files is None else str(limits.open_files),
    )
    if limits.file_bytes is not None:
        yield "largest file", format_bytes(limits.file_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB"


def _yes(able: bool) -> str:
    return "yes" if able else "no"


def _indent(text: str, num_spaces: int = 2) -> str:
    return "\n".join(" " * num_spaces + line for line in text.splitlines())
