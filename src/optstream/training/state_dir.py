"""The directory that holds a run's optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optstream.errors import ConfigError
from optstream.store.checks import check_directory


def check_state_directory(path: Path) -> None:
    """Refuse a directory that cannot be made; makes nothing.

    The directory itself may be missing, its parent may not: a mistyped mount point would otherwise
    put the state on another drive.

    Raises:
        ConfigError: a file, or without a parent.
        StoreError: not on a drive, or cannot be written.
    """
    parent = path.absolute().parent
    if path.exists():
        if not path.is_dir():
            raise ConfigError(f"state directory {path} is a file; give a directory on a drive")
    elif not parent.is_dir():
        raise ConfigError(
            f"state directory {path} cannot be made, {parent} is missing; "
            "make it, or give a directory on a drive"
        )
    check_directory(path if path.exists() else parent, path)


@contextmanager
def state_directory(path: Path) -> Iterator[None]:
    """Make the directory for its owner alone if it is missing, and take it away again when empty.

    Raises:
        ConfigError: it cannot be made.
    """
    made = not path.exists()
    if made:
        try:
            path.mkdir(mode=0o700, exist_ok=True)  # another rank may be faster
        except OSError as error:
            raise ConfigError(
                f"state directory {path} cannot be made: {error.strerror}; give another --state-dir"
            ) from error
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                path.rmdir()
