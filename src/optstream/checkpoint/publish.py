"""Make a snapshot a checkpoint: a directory that is there whole, or not at all.

    PATH.tmp/                  made and locked by rank 0; unlocked: a dead run's, removed
      rank00000/window00000.safetensors ...   links to the frozen files, or copies (`placing`)
      rank00001/...            each rank makes its own
      manifest.json            last, when all ranks' files are durable
    PATH.tmp -> PATH           in one step (`staging`)

Ordering: files, then their directory, then the manifest, then the rename, then the parent are made
durable. Where it fails on one rank it fails on all, and what was at PATH is still there.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from optstream import durable
from optstream.checkpoint.manifest_json import to_json
from optstream.checkpoint.placing import place
from optstream.checkpoint.snapshot import Snapshot
from optstream.checkpoint.staging import MANIFEST, commit, staged, staging_path
from optstream.distributed.ranks import Ranks
from optstream.errors import StoreError


def publish(snapshot: Snapshot, path: Path, ranks: Ranks) -> None:
    """Make a snapshot a checkpoint at `path`; an older one there stays until the new one is whole.

    Args:
        snapshot: the manifest is of all ranks, the files are this rank's.

    Raises:
        StoreError: another save to this path is under way, or the filesystem refuses; what was at
            `path` before is still there.
        RankError: the same on another rank, or one is gone.
    """
    manifest = to_json(snapshot.manifest)
    try:
        with _staging_of_all(path, ranks) as staging:
            with ranks.together():
                _place_files(snapshot, staging)
            if ranks.rank == 0:
                durable.write_file(staging / MANIFEST, manifest)
                durable.sync(staging)
                commit(staging, path)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(error.errno, f"cannot save to {path}: {error}") from error


@contextlib.contextmanager
def _staging_of_all(path: Path, ranks: Ranks) -> Iterator[Path]:
    """Give every rank the directory that rank 0 makes and holds; all leave it together."""
    with ranks.together(), contextlib.ExitStack() as stack:
        with ranks.together():
            staging = stack.enter_context(staged(path)) if ranks.rank == 0 else staging_path(path)
        with ranks.together():
            if not staging.is_dir():
                raise StoreError(
                    errno.ENOENT,
                    f"rank {ranks.rank} does not see {staging}, as rank 0 has made one; save to "
                    "the same path on every rank, on a filesystem that all share",
                )
        yield staging


def _place_files(snapshot: Snapshot, staging: Path) -> None:
    windows = snapshot.manifest.windows
    files = {staging / windows[window].file: file for window, file in snapshot.files.items()}
    folders = {target.parent for target in files}
    for folder in folders:
        folder.mkdir(mode=0o700)
    place(files)
    for folder in folders:
        durable.sync(folder)
