"""Whether a checkpoint on a filesystem is what was once written there."""

from __future__ import annotations

import os

from optstream.checkpoint import directory


def verify(path: str | os.PathLike[str]) -> None:
    """Check a checkpoint: its manifest, every file's presence and size, every byte's digest.

    Raises:
        CheckpointError: not a whole checkpoint, or not that alone; the first thing that is wrong
            is named.
        FormatError: a damaged manifest, or a newer version's.
        WindowReadError: the first bytes that are not what was written, or cannot be read.
    """
    snapshot = directory.open_checkpoint(directory.checkpoint_path(path))
    directory.check_alone(snapshot)
    directory.verify(snapshot)
