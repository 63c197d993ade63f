"""Show what live processes hold on a drive, also in files without a name, and what dead ones left.

Nameless files are in what df shows and not in what du shows; they go when their process ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from optstream.cli.parser import given_path
from optstream.cli.table import align
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.doctor.held import Holding
    from optstream.doctor.listing import Listing

SUMMARY = "show which processes hold state on a drive, and what dead ones left"
_COMMAND_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directory", type=given_path, metavar="DIR", help="as offload was given it")
    parser.add_argument(
        "--purge",
        action="store_true",
        help="remove what dead processes left in DIR; what a live one holds is never touched",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """List, print, and return the exit code."""
    from optstream.doctor.listing import list_directory

    listing = list_directory(args.directory, purge=args.purge)
    text = json.dumps(asdict(listing), indent=1) if args.json else "\n".join(_lines(listing))
    sys.stdout.write(text + "\n")
    return 0


def _lines(listing: Listing) -> Iterator[str]:
    yield (
        f"{listing.directory}: its filesystem has {format_bytes(listing.used_bytes)} in use, "
        f"{format_bytes(listing.nameless_bytes)} of that in files without a name, "
        f"{format_bytes(listing.free_bytes)} free"
    )
    if listing.here:
        yield align(list(_rows(listing.here)))
    else:
        yield "no live process was found to hold state here"
    if listing.elsewhere:
        yield "elsewhere on this filesystem"
        yield align(list(_rows(listing.elsewhere)))
    for left in listing.stale:
        what = f"{left.path}: {format_bytes(left.num_bytes)} of a dead process"
        yield f"{what}, removed" if left.removed else f"{what}; --purge removes it"
    for path in listing.unseen:
        yield f"{path}: held by a process that cannot be seen from here, or by another user's"
    if listing.num_hidden:
        yield (
            f"{listing.num_hidden} processes of other users could not be looked into; "
            "root sees what they hold"
        )


def _rows(holdings: Sequence[Holding]) -> Iterator[tuple[str, ...]]:
    yield "pid", "user", "files", "nameless", "with a name", "directory", "command"
    for holding in holdings:
        yield (
            str(holding.pid),
            holding.user,
            str(holding.num_files),
            format_bytes(holding.nameless_bytes),
            format_bytes(holding.named_bytes),
            _printable(holding.directory),
            _short(_printable(holding.command)),
        )


def _printable(text: str) -> str:
    """Return text that other users wrote without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _short(command: str) -> str:
    return command if len(command) <= _COMMAND_WIDTH else command[: _COMMAND_WIDTH - 3] + "..."
