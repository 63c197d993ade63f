"""A slower drive than there is: the kernel holds this process to a bandwidth each way.

It is a cgroup of the blkio (version 1) or io controller (version 2), so whoever takes part in a
contest is held alike, below the code that is measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from memory_group import NoGroupError, find_parent

from optstream.doctor.disks import find_disks
from optstream.mounts import find_mount


@contextlib.contextmanager
def slow_drive(directory: Path, bytes_per_s: int) -> Iterator[None]:
    """Let this process read, and write, at most so many bytes a second of a directory's disks.

    Raises:
        NoGroupError: such a group cannot be made here.
    """
    version, parent = find_parent("blkio", "io")
    group = parent / f"optstream-drive-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoGroupError(f"cannot make a cgroup in {parent}: {error.strerror}") from error
    try:
        _limit(group, version, directory, bytes_per_s)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _limit(group: Path, version: int, directory: Path, bytes_per_s: int) -> None:
    disks = find_disks(directory, find_mount(directory))
    if not disks:
        raise NoGroupError(f"{directory} is on no disk that the kernel names")
    for disk in disks:
        number = Path(f"/sys/block/{disk.name}/dev").read_text().strip()
        if version == 1:
            for way in ("read", "write"):
                limit = group / f"blkio.throttle.{way}_bps_device"
                limit.write_text(f"{number} {bytes_per_s}")
        else:
            (group / "io.max").write_text(f"{number} rbps={bytes_per_s} wbps={bytes_per_s}")
