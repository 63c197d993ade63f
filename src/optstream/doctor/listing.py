"""What is in a directory and on its filesystem: held by the living, left by the dead."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optstream.distributed.place import find_places, remove_left
from optstream.doctor.held import Held, Holding, find_held
from optstream.errors import StoreError
from optstream.mounts import read_free_bytes
from optstream.store.claim import FoundClaim, find_claims, purge_stale


@dataclass(frozen=True)
class Left:
    """What a dead process left: a claim, or a rank's folder.

    Attributes:
        num_bytes: of window files in a claim.
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
        unseen: claims and ranks' folders in it that a process holds which cannot be seen from here,
            or of which only another user can tell.
        num_hidden: processes of other users that could not be looked into.
        used_bytes, free_bytes: of the filesystem, as df shows them.
    """

    directory: str
    here: tuple[Holding, ...]
    elsewhere: tuple[Holding, ...]
    nameless_bytes: int
    stale: tuple[Left, ...]
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
    places = find_places(path)
    claims = [claim for base in (path, *places) for claim in _claims(base)]
    if purge:
        for base in (path, *places):
            purge_stale(base)
        remove_left(path)
    held = find_held(path.stat().st_dev)
    below = [Path(holding.directory).is_relative_to(path) for holding in held.holdings]
    stale = [(claim.path, claim.num_bytes) for claim in claims if claim.held is False]
    stale += [(place, 0) for place, is_held in places.items() if is_held is False]
    space = os.statvfs(path)
    return Listing(
        directory=str(path),
        here=tuple(h for h, inside in zip(held.holdings, below, strict=True) if inside),
        elsewhere=tuple(h for h, inside in zip(held.holdings, below, strict=True) if not inside),
        nameless_bytes=held.nameless_bytes,
        stale=tuple(Left(str(at), size, removed=not at.exists()) for at, size in stale),
        unseen=tuple(_unseen(held, claims, places)),
        num_hidden=held.num_hidden,
        used_bytes=(space.f_blocks - space.f_bfree) * space.f_frsize,
        free_bytes=read_free_bytes(path),
    )


def _claims(directory: Path) -> list[FoundClaim]:
    try:
        return list(find_claims(directory))
    except OSError:
        return []  # another user's place, or one that is gone


def _unseen(
    held: Held, claims: Sequence[FoundClaim], places: Mapping[Path, bool | None]
) -> Iterator[str]:
    seen = {lock for holding in held.holdings for lock in holding.locks}
    states = [(claim.path, claim.held) for claim in claims] + list(places.items())
    for path, is_held in states:
        if is_held is not False and str(path) not in seen:
            yield str(path)


def _readable(directory: Path) -> Path:
    try:
        path = directory.resolve(strict=True)
        is_directory = path.is_dir()
    except (OSError, RuntimeError):  # not there, a name that is too long, a loop of links
        is_directory = False
    if not is_directory:
        raise StoreError(errno.ENOTDIR, f"{directory} is no directory; give one that is there")
    if not os.access(path, os.R_OK | os.X_OK):
        raise StoreError(
            errno.EACCES, f"{directory} may not be read; run optstream ls as a user who may"
        )
    return path
