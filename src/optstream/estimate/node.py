"""What a node has: its drives and memory, as `optstream doctor --json` found them or as given."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optstream.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """None is what is not known.

    Attributes:
        directories: where the state would go.
        bytes_per_s: of its drives together, reads and writes at once.
        space_bytes: free on its drives.
        memory_bytes: that training may still use.
        open_files: the most that a process may have.
        io_threads: a drive.
    """

    directories: tuple[str, ...] = ()
    bytes_per_s: float | None = None
    space_bytes: int | None = None
    memory_bytes: int | None = None
    open_files: int | None = None
    io_threads: int | None = None

    def given(self, **known: float | None) -> Node:
        """Return this node with what the user knows better."""
        return replace(self, **{key: value for key, value in known.items() if value is not None})  # type: ignore[arg-type]


def read_node(path: Path) -> Node:
    """Return what `optstream doctor --json` found.

    Raises:
        ConfigError: not its output, or no directory in it is usable.
    """
    try:
        facts: Any = json.loads(path.read_text())
        use, limits = facts["use"], facts["limits"]
        if use is None:
            raise ConfigError(f"{path}: optstream doctor found no usable directory; try another")
        return Node(
            directories=tuple(map(str, use["directories"])),
            bytes_per_s=use["bytes_per_s"] and float(use["bytes_per_s"]),
            space_bytes=int(use["free_bytes"]),
            memory_bytes=int(limits["available_bytes"]),
            open_files=limits["open_files"] and int(limits["open_files"]),
            io_threads=int(use["io_threads"]),
        )
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; write it with optstream doctor --json DIR"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is not what optstream doctor --json writes; write it with that"
        ) from error
