"""What the kernel says about memory: this process's own, its limit, and what is left.

All is read from `/proc`; the mount table in it says where the cgroups are, so tests give a tree of
their own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optstream.mounts import PROC, read_mounts

# cgroup v1 writes "no limit" as the largest multiple of the page size; no machine has an EiB
_NO_LIMIT_BYTES = 2**60
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_LIMIT_FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this process at one moment, in bytes.

    Attributes:
        anon_bytes: heap, stacks, private mappings: what the OOM killer counts and cannot reclaim.
        file_bytes: mapped page cache, reclaimable.
        shmem_bytes: shared memory and tmpfs mappings, not reclaimable.
        limit_bytes: the smallest limit of the process's cgroups up the tree; None without one.
    """

    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    limit_bytes: int | None


def read_memory(proc: Path = PROC) -> MemoryUse:
    """Return what the kernel counts for this process now.

    Args:
        proc: where procfs is mounted.
    """
    fields = _read_kib(proc / "self/status")
    limits = [limit for limit in _limits(proc) if limit < _NO_LIMIT_BYTES]
    return MemoryUse(
        anon_bytes=fields.get("RssAnon", fields.get("VmRSS", 0)),  # VmRSS: kernels before 4.5
        file_bytes=fields.get("RssFile", 0),
        shmem_bytes=fields.get("RssShmem", 0),
        limit_bytes=min(limits, default=None),
    )


def read_total_bytes(proc: Path = PROC) -> int:
    """Return the most memory this process may ever have: the machine's, or its limit's."""
    total, limit = _read_kib(proc / "meminfo")["MemTotal"], read_memory(proc).limit_bytes
    return total if limit is None else min(total, limit)


def read_available_bytes(proc: Path = PROC, *, swap: bool = True) -> int:
    """Return how many more bytes this process could use before the kernel must kill something.

    The smaller of what the machine has (MemAvailable and free swap) and what the limit leaves.

    Args:
        swap: count what would have to go there.
    """
    use = read_memory(proc)
    machine = _read_kib(proc / "meminfo")
    available = machine.get("MemAvailable", machine["MemFree"])
    available += machine.get("SwapFree", 0) if swap else 0
    if use.limit_bytes is not None:
        available = min(available, use.limit_bytes - use.anon_bytes - use.shmem_bytes)
    return max(available, 0)


def trim_heap() -> None:
    """Give freed heap pages back to the kernel, from the middle of the heap too.

    glibc keeps up to 64 MiB of what is freed, and more where small blocks lie between large ones.
    Other C libraries have no such call and no such habit.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def _read_kib(path: Path) -> dict[str, int]:
    """Return the `Name:  123 kB` lines of a proc file, in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def _limits(proc: Path) -> Iterator[int]:
    """Yield every memory limit that binds this process, from its cgroups to their roots."""
    for kind, directory, top in _cgroups(proc):
        while True:
            with suppress(OSError, ValueError):  # the root has no such file; "max" is no limit
                yield int((directory / _LIMIT_FILES[kind]).read_text())
            if directory == top:
                break
            directory = directory.parent


def _cgroups(proc: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield (filesystem type, own directory, mount point) of each memory hierarchy."""
    try:
        own = _own_groups((proc / "self/cgroup").read_text())
    except OSError:
        return
    for mount in read_mounts(proc).values():
        if mount.kind in own and (mount.kind == "cgroup2" or "memory" in mount.options):
            # relative to what is mounted: in a container that is often not the hierarchy's root
            path, root = PurePosixPath(own[mount.kind]), mount.root
            inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
            if ".." not in inside.parts:  # else outside of this cgroup namespace
                yield mount.kind, Path(mount.point) / inside, Path(mount.point)


def _own_groups(text: str) -> dict[str, str]:
    """Return the path of this process in the memory hierarchies: filesystem type -> path."""
    own = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    return own
