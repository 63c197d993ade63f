"""What is in a directory and on its filesystem: held by the living, left by the dead."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from optstream.doctor.held import Holding, find_held
from optstream.errors import StoreError
from optstream.store.claim import FoundClaim, find_claims, purge_stale


@dataclass(frozen=True)
class StaleClaim:
    """What a dead process left.

    Attributes:
        num_bytes: of its window files.
        removed: it was purged just now.
    """

    path: str
    num_bytes: int
    removed: bool


@dataclass(frozen=True)
class Listing:
    """What `optstream ls` shows.

    Attributes:
        directory: real path.
        here: what live processes hold in it and below.
        elsewhere: what they hold on the same filesystem outside of it.
        nameless_bytes: of both; a file that several processes hold counts once.
        stale: what dead processes left in the directory.
        unseen: claims in it that a process holds which cannot be seen from here, or whose state
            only another user can tell.
        num_hidden: processes of other users that could not be looked into.
        used_bytes, free_bytes: of the filesystem, as df shows them.
    """

    directory: str
    here: tuple[Holding, ...]
    elsewhere: tuple[Holding, ...]
    nameless_bytes: int
    stale: tuple[StaleClaim, ...]
    unseen: tuple[str, ...]
    num_hidden: int
    used_bytes: int
    free_bytes: int


def list_directory(directory: Path, *, purge: bool) -> Listing:
    """Return what is there.

    Args:
        purge: remove what dead processes left.

    Raises:
        StoreError: no directory, or it may not be read.
    """
    path = _readable(directory)
    claims = list(find_claims(path))
    if purge:
        purge_stale(path)
    held = find_held(path.stat().st_dev)
    below = [Path(holding.directory).is_relative_to(path) for holding in held.holdings]
    seen = {claim for holding in held.holdings for claim in holding.claims}
    space = os.statvfs(path)
    return Listing(
        directory=str(path),
        here=tuple(h for h, inside in zip(held.holdings, below, strict=True) if inside),
        elsewhere=tuple(h for h, inside in zip(held.holdings, below, strict=True) if not inside),
        nameless_bytes=held.nameless_bytes,
        stale=tuple(_stale(claim) for claim in claims if claim.held is False),
        unseen=tuple(
            str(claim.path)
            for claim in claims
            if claim.held is not False and str(claim.path) not in seen
        ),
        num_hidden=held.num_hidden,
        used_bytes=(space.f_blocks - space.f_bfree) * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
    )


def _stale(claim: FoundClaim) -> StaleClaim:
    return StaleClaim(str(claim.path), claim.num_bytes, removed=not claim.path.exists())


def _readable(directory: Path) -> Path:
    path = directory.resolve()
    if not path.is_dir():
        raise StoreError(errno.ENOTDIR, f"{directory} is no directory; give one that is there")
    if not os.access(path, os.R_OK | os.X_OK):
        raise StoreError(
            errno.EACCES, f"{directory} may not be read; run optstream ls as a user who may"
        )
    return path
