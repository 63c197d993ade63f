"""What a filesystem can do, found out by the code that `offload` itself makes its files with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optstream.format import build_header
from optstream.store import linux
from optstream.store.base import WindowFile
from optstream.store.checks import check_space
from optstream.store.claim import Claim
from optstream.store.files import Drive
from optstream.store.live import LiveFile

_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Abilities:
    """What window files can do in a directory.

    Attributes:
        direct_io: transfers bypass the page cache.
        align_bytes: what direct I/O needs; None where the kernel does not say.
        reserves: space is reserved by one call; else zeros are written.
        nameless: files need no name, so that nothing is left of a killed process.
        links: a file can be given a further name; else a save copies the state.
        reflinks: a file can be copied by sharing its blocks, which nothing here needs; None: not
            tried, for want of nameless files.
        announced: what `offload` would say of it, in its own words.
    """

    direct_io: bool
    align_bytes: int | None
    reserves: bool
    nameless: bool
    links: bool
    reflinks: bool | None
    announced: tuple[str, ...]


def find_abilities(directory: Path) -> Abilities:
    """Try a file in an existing directory; nothing is left of it.

    Raises:
        OSError: no file can be made there; ours (StoreError) where offload's would be.
    """
    announced: list[str] = []
    with temporary_files(directory, 1, _PROBE_BYTES, announced.append) as (file,):
        return Abilities(
            direct_io=file.direct,
            align_bytes=linux.direct_align_bytes(file.fd),
            reserves=_reserves(file),
            nameless=file.path is None,
            links=_links(file, directory),
            reflinks=_reflinks(file, directory),
            announced=tuple(announced),
        )


@contextmanager
def temporary_files(
    directory: Path, count: int, data_bytes: int, announce: Callable[[str], None]
) -> Iterator[list[LiveFile]]:
    """Make window files that go when the block ends, however it ends."""
    drive = Drive(directory, announce)
    spec = WindowFile(build_header([], data_bytes), data_bytes)
    files: list[LiveFile] = []
    try:
        check_space([(directory, spec.file_bytes)] * count, "a trial")
        for window in range(count):
            files.append(drive.create(window, spec))
        yield files
    finally:
        for file in files:
            file.remove()
        drive.close()


def _reserves(file: LiveFile) -> bool:
    try:
        linux.fallocate(file.fd, _PROBE_BYTES)
    except OSError:
        return False
    return True


def _links(file: LiveFile, directory: Path) -> bool:
    try:
        # in a claim: a process that is killed right here leaves what the next start removes
        claim = Claim(directory)
    except OSError:
        return False
    try:
        linux.link(file.fd, claim.file(0))
    except OSError:
        return False
    finally:
        claim.release()
    return True


def _reflinks(file: LiveFile, directory: Path) -> bool | None:
    if file.path is not None:
        return None
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        linux.overwrite_in_place(fd)  # btrfs shares only between files that are alike in this
        return linux.share_blocks(file.fd, fd)
    finally:
        os.close(fd)
