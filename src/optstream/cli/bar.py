"""A bar on standard error while something is measured; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util


@contextmanager
def measuring(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs; yield what is told of (done, total)."""
    if not sys.stderr.isatty() or util.find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"measuring {escape(what)}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
