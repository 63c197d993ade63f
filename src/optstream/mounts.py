"""The kernel's mount table, and the room on what is mounted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo.

    Attributes:
        root: the directory of the filesystem that is mounted ("/" but for bind mounts).
        point: where it is mounted.
        kind: filesystem type.
        options: of the filesystem, as the kernel prints them.
        source: what is mounted, often a block device ("/dev/nvme0n1p1").
    """

    root: str
    point: str
    kind: str
    options: tuple[str, ...]
    source: str = "none"


def read_mounts(proc: Path = PROC) -> dict[int, Mount]:
    """Return the mount table by mount id; empty where /proc does not tell."""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return {}
    mounts = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        number, _, _, root, point, *_ = before.split(" ")
        kind, source, options = after.split(" ", 2)
        mounts[int(number)] = Mount(
            _unescape(root), _unescape(point), kind, tuple(options.split(",")), _unescape(source)
        )
    return mounts


def find_mount(path: Path) -> Mount | None:
    """Return what is mounted at an existing path, seen through bind mounts and subvolumes.

    None where /proc does not tell. By mount id: the `st_dev` of overlay and btrfs is in no table.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            info = (PROC / f"self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)
    except OSError:
        return None
    number = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    return read_mounts().get(int(number[1])) if number else None


def read_free_bytes(path: Path) -> int:
    """Return what is free on the filesystem of a path, for unprivileged users."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _unescape(field: str) -> str:
    """Undo the octal escapes of the mount table (a space is `\\040`)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
