"""What is known of a directory, and of several: facts, what `offload` would do, what to give it."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from optstream.doctor.advice import Settings, conduct, find_warnings, settings_for
from optstream.doctor.bandwidth import Bandwidth, Progress, measure
from optstream.doctor.disks import Disk, find_disks
from optstream.doctor.probe import Abilities, find_abilities
from optstream.errors import OffloadError
from optstream.memory import read_available_bytes, read_memory
from optstream.mounts import Mount, find_mount, read_free_bytes
from optstream.store.checks import check_directory, missing_directories


@dataclass(frozen=True)
class Filesystem:
    """Where a directory is.

    Attributes:
        kind: its type; "unknown" where /proc does not tell.
        source: what is mounted.
        point: where.
        free_bytes: for unprivileged users.
        free_files: inodes; None where the filesystem makes them as needed.
    """

    kind: str
    source: str
    point: str
    free_bytes: int
    free_files: int | None


@dataclass(frozen=True)
class DirectoryReport:
    """One directory.

    Attributes:
        path: as given, absolute.
        tested: the nearest directory that exists; nothing is made that stays.
        refusal: what `offload` would raise; None: usable.
        filesystem, disks, abilities, bandwidth: None or empty as far as it cannot be known.
        conduct: what `offload` would do there, and why.
        settings: for `offload`; None if refused.
        warnings: what the user should know, each with what to do.
    """

    path: str
    tested: str
    refusal: str | None
    filesystem: Filesystem | None
    disks: tuple[Disk, ...]
    abilities: Abilities | None
    bandwidth: Bandwidth | None
    conduct: tuple[str, ...]
    settings: Settings | None
    warnings: tuple[str, ...]

    @property
    def usable(self) -> bool:
        return self.refusal is None


@dataclass(frozen=True)
class Limits:
    """What this process may use.

    Attributes:
        available_bytes: memory it could still take.
        memory_limit_bytes: of its cgroups; None without one.
        open_files: the most it may have, one a window; None without a limit.
        file_bytes: the largest it may write; None without a limit.
    """

    available_bytes: int
    memory_limit_bytes: int | None
    open_files: int | None
    file_bytes: int | None


def find_limits() -> Limits:
    """Return the limits of this process."""
    return Limits(
        available_bytes=read_available_bytes(),
        memory_limit_bytes=read_memory().limit_bytes,
        open_files=_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        file_bytes=_finite(resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
    )


def examine(path: Path, limits: Limits, progress: Progress | None) -> DirectoryReport:
    """Look at one directory as `offload` would, and leave nothing there.

    Args:
        path: absolute; need not exist.
        progress: of the measurement; None: nothing is measured.
    """
    missing = missing_directories(path)
    tested = missing[0].parent if missing else path
    mount = find_mount(tested)
    abilities = bandwidth = settings = refusal = None
    try:
        check_directory(tested, path)
        abilities = find_abilities(tested)
        if progress is not None:
            bandwidth = measure(tested, progress)
        settings = settings_for(bandwidth, limits.available_bytes)
    except OSError as error:
        refusal = _reason(path, error)
    disks = find_disks(tested, mount)
    return DirectoryReport(
        path=str(path),
        tested=str(tested),
        refusal=refusal,
        filesystem=_filesystem(tested, mount),
        disks=disks,
        abilities=abilities,
        bandwidth=bandwidth,
        conduct=() if abilities is None else tuple(conduct(abilities)),
        settings=settings,
        warnings=() if abilities is None else tuple(find_warnings(mount, disks, abilities)),
    )


def _filesystem(path: Path, mount: Mount | None) -> Filesystem | None:
    try:
        free = os.statvfs(path)
    except OSError:
        return None
    return Filesystem(
        kind=mount.kind if mount else "unknown",
        source=mount.source if mount else "unknown",
        point=mount.point if mount else "unknown",
        free_bytes=read_free_bytes(path),
        free_files=free.f_favail if free.f_files else None,
    )


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, OffloadError):
        return str(error)
    return f"{path} cannot hold the state: {error.strerror}; choose a directory on a drive"


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
