"""Where windows live between two uses: one file and one line of `_KINDS` a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from optstream.errors import ConfigError
from optstream.store.base import Store, WindowFile
from optstream.store.direct import Direct
from optstream.store.mapped import Mapped
from optstream.store.memory import Memory

__all__ = ["Store", "WindowFile", "open_store"]

Directory = str | os.PathLike[str]

_KINDS: dict[str, Callable[[Sequence[Directory]], Store]] = {
    "direct": Direct,
    "mapped": Mapped,
    "memory": lambda directories: Memory(),
}


def open_store(kind: str, directories: Directory | Sequence[Directory]) -> Store:
    """Return a new, empty store; nothing is made or checked on a drive before `reserve`.

    Args:
        kind: "direct", "mapped" or "memory".
        directories: one path or several; "memory" uses none of them.

    Raises:
        ConfigError: an unknown kind, or directories that are no paths.
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(f'"{name}"' for name in _KINDS)
        raise ConfigError(f"store={kind!r} is unknown; choose one of {known}")
    if isinstance(directories, str | bytes) or not isinstance(directories, Sequence):
        directories = [directories]
    return _KINDS[kind](directories)
