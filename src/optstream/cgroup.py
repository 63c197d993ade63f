"""Memory cgroups of this process, from its own to the root, versions 1 and 2.

    what           | version 1                        | version 2
    ---------------+----------------------------------+--------------------------
    limit          | memory.limit_in_bytes            | memory.max
    used           | memory.usage_in_bytes            | memory.current
    kinds          | memory.stat, total_*             | memory.stat
    limit hits     | memory.failcnt                   | memory.events, max
    OOM kills      | memory.oom_control               | memory.events, oom_kill
    stalls         | of the machine, /proc/pressure   | memory.pressure

A root may lack any of these files, and a container may see only a part of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optstream.mounts import read_mounts

# version 1 writes "no limit" as the largest multiple of the page size; no machine has an EiB
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class Group:
    """One memory cgroup with all below it; None where the kernel does not tell.

    Attributes:
        limit_bytes: what it may charge; None also without a limit.
        used_bytes: what it charges.
        anon_bytes: heap, stacks, private mappings; not reclaimable without swap.
        file_bytes: page cache, reclaimable once it is written back; what is charged to the group
            that read it first.
        shmem_bytes: shared memory and tmpfs; as `anon_bytes`.
        slab_bytes: of the kernel's own, reclaimable (version 2).
        limit_hits: how often a charge met the limit, since the group was made.
        oom_kills: processes that were killed for it, since then.
    """

    limit_bytes: int | None = None
    used_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    slab_bytes: int | None = None
    limit_hits: int | None = None
    oom_kills: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """What it may charge yet when all page cache is reclaimed; None without a limit."""
        if self.limit_bytes is None or self.used_bytes is None:
            return None
        reclaimable = (self.file_bytes or 0) + (self.slab_bytes or 0)
        return self.limit_bytes - max(0, self.used_bytes - reclaimable)


def read_groups(proc: Path) -> list[Group]:
    """Return the memory cgroups of this process: its own, then those that hold it."""
    groups = [read_group(directory) for _, directory in _directories(proc)]
    return [group for group in groups if group != Group()]  # a hierarchy without the controller


def read_group(directory: Path) -> Group:
    """Return what the files of one cgroup tell."""
    old = (directory / "memory.limit_in_bytes").exists()
    return _read_v1(directory) if old else _read_v2(directory)


def binding(groups: list[Group]) -> Group | None:
    """Return the group with the smallest limit; the process's own if none has one."""
    limited = [group for group in groups if group.limit_bytes is not None]
    return min(limited, key=lambda group: group.limit_bytes or 0, default=next(iter(groups), None))


def read_stalled_s(proc: Path) -> float | None:
    """Return seconds for which some process of this one's cgroup has waited for memory, ever.

    Of the whole machine where no cgroup of version 2 tells; None where the kernel does not tell.
    """
    own = [path for kind, path in _directories(proc) if kind == "cgroup2"][:1]
    for path in (*(path / "memory.pressure" for path in own), proc / "pressure/memory"):
        total = re.search(r"^some .*\btotal=(\d+)", _read(path), re.MULTILINE)
        if total:
            return int(total[1]) / 1e6
    return None


def _read_v1(path: Path) -> Group:
    stat = _read_table(path / "memory.stat")
    cache, shmem = stat.get("total_cache"), stat.get("total_shmem", 0)
    return Group(
        limit_bytes=_read_limit(path / "memory.limit_in_bytes"),
        used_bytes=_read_number(path / "memory.usage_in_bytes"),
        anon_bytes=stat.get("total_rss"),
        file_bytes=None if cache is None else cache - shmem,
        shmem_bytes=stat.get("total_shmem"),
        limit_hits=_read_number(path / "memory.failcnt"),
        oom_kills=_read_table(path / "memory.oom_control").get("oom_kill"),
    )


def _read_v2(path: Path) -> Group:
    stat, events = _read_table(path / "memory.stat"), _read_table(path / "memory.events")
    cache, shmem = stat.get("file"), stat.get("shmem", 0)
    return Group(
        limit_bytes=_read_limit(path / "memory.max"),
        used_bytes=_read_number(path / "memory.current"),
        anon_bytes=stat.get("anon"),
        file_bytes=None if cache is None else cache - shmem,
        shmem_bytes=stat.get("shmem"),
        slab_bytes=stat.get("slab_reclaimable"),
        limit_hits=events.get("max"),
        oom_kills=events.get("oom_kill"),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the root has no such file, or it is not for this user


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _read_limit(path: Path) -> int | None:
    number = _read_number(path)
    return number if number is not None and number < _NO_LIMIT_BYTES else None


def _read_table(path: Path) -> dict[str, int]:
    """Return the `name 123` lines of a file."""
    lines = re.findall(r"^(\w+) (\d+)$", _read(path), re.MULTILINE)
    return {name: int(number) for name, number in lines}


def _directories(proc: Path) -> Iterator[tuple[str, Path]]:
    """Yield (filesystem type, directory) from this process's groups up to their mount points."""
    for kind, own, top in _hierarchies(proc):
        directory = own
        while True:
            yield kind, directory
            if directory == top:
                break
            directory = directory.parent


def _hierarchies(proc: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield (filesystem type, own directory, mount point) of each hierarchy."""
    own = _own_groups(_read(proc / "self/cgroup"))
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
