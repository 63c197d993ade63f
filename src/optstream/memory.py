"""What the kernel says about memory: this process's own, its cgroups', and what is left.

All is read from `/proc`; the mount table in it says where the cgroups are, so tests give a tree of
their own.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from optstream.cgroup import Group, binding, read_groups, read_stalled_s
from optstream.mounts import PROC
from optstream.units import format_bytes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_RLIMITS = {"data size": "VmData", "address space": "VmSize"}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this process at one moment, in bytes.

    Attributes:
        anon_bytes: heap, stacks, private mappings: what the OOM killer counts and cannot reclaim.
        file_bytes: mapped page cache, reclaimable.
        shmem_bytes: shared memory and tmpfs mappings, not reclaimable.
        limit_bytes: the smallest limit of the process's cgroups up the tree; None without one.
        group: the cgroup with that limit, or the process's own if none has one; None without any.
        stalled_s: seconds for which some process of its cgroup (of the machine, with cgroups of
            version 1) waited for memory, ever; None where the kernel does not tell.
    """

    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    limit_bytes: int | None = None
    group: Group | None = None
    stalled_s: float | None = None


def read_memory(proc: Path = PROC) -> MemoryUse:
    """Return what the kernel counts for this process now.

    Args:
        proc: where procfs is mounted.
    """
    fields = _read_kib(proc / "self/status")
    group = binding(read_groups(proc))
    return MemoryUse(
        anon_bytes=fields.get("RssAnon", fields.get("VmRSS", 0)),  # VmRSS: kernels before 4.5
        file_bytes=fields.get("RssFile", 0),
        shmem_bytes=fields.get("RssShmem", 0),
        limit_bytes=group.limit_bytes if group else None,
        group=group,
        stalled_s=read_stalled_s(proc),
    )


def read_total_bytes(proc: Path = PROC) -> int:
    """Return the most memory this process may ever have: the machine's, or its limit's."""
    total, limit = _read_kib(proc / "meminfo")["MemTotal"], read_memory(proc).limit_bytes
    return total if limit is None else min(total, limit)


def read_available_bytes(proc: Path = PROC, *, swap: bool = True) -> int:
    """Return how many more bytes this process could use before the kernel must refuse or kill.

    The least of what the machine has (MemAvailable and free swap), what each cgroup up the tree
    leaves when its page cache is reclaimed, and what the process itself may have (ulimit -d, -v).

    Args:
        swap: count what would have to go there.
    """
    fields = _read_kib(proc / "self/status")
    machine = _read_kib(proc / "meminfo")
    rooms = [machine.get("MemAvailable", machine["MemFree"])]
    rooms[0] += machine.get("SwapFree", 0) if swap else 0
    for group in read_groups(proc):
        if group.room_bytes is not None:
            rooms.append(group.room_bytes)
        elif group.limit_bytes is not None:  # what others in it use is not told
            own = fields.get("RssAnon", fields.get("VmRSS", 0)) + fields.get("RssShmem", 0)
            rooms.append(group.limit_bytes - own)
    rooms += _process_rooms(proc, fields)
    return max(min(rooms), 0)


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory in a report; None where the kernel does not tell.

    Attributes:
        anon_bytes, file_bytes, shmem_bytes, limit_bytes: as in MemoryUse.
        group_anon_bytes, group_file_bytes, group_shmem_bytes: of MemoryUse.group; page cache that
            no process has mapped counts there.
        limit_hits: how often that group has met its limit since the last record; reclaiming page
            cache is such a time too.
        oom_kills: processes killed for it since then.
        memory_stall_s: time since then in which some process of the cgroup (of the machine, with
            cgroups of version 1) waited for memory.
    """

    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    limit_bytes: int | None
    group_anon_bytes: int | None
    group_file_bytes: int | None
    group_shmem_bytes: int | None
    limit_hits: int | None
    oom_kills: int | None
    memory_stall_s: float | None

    def describe_memory(self) -> str:
        """Return it in words, without what is zero or not told."""
        text = f"anonymous memory {format_bytes(self.anon_bytes)}"
        text += f", file {format_bytes(self.file_bytes)}"
        if self.shmem_bytes:
            text += f", shared {format_bytes(self.shmem_bytes)}"
        if self.limit_bytes is not None:
            text += f", limit {format_bytes(self.limit_bytes)}"
        if self.memory_stall_s:
            text += f", {self.memory_stall_s:.2f} s short of memory"
        return text


class MemoryMeter:
    """Makes the records of one series."""

    def __init__(self) -> None:
        self._last = read_memory()

    def read(self) -> MemoryRecord:
        """Return memory now, and what has happened since the last record."""
        last, now = self._last, read_memory()
        self._last = now
        group, before = now.group or Group(), last.group or Group()
        return MemoryRecord(
            anon_bytes=now.anon_bytes,
            file_bytes=now.file_bytes,
            shmem_bytes=now.shmem_bytes,
            limit_bytes=now.limit_bytes,
            group_anon_bytes=group.anon_bytes,
            group_file_bytes=group.file_bytes,
            group_shmem_bytes=group.shmem_bytes,
            limit_hits=_grown(before.limit_hits, group.limit_hits),
            oom_kills=_grown(before.oom_kills, group.oom_kills),
            memory_stall_s=_grown(last.stalled_s, now.stalled_s),
        )


def _grown(before: Number | None, now: Number | None) -> Number | None:
    if before is None or now is None:
        return None
    return max(now - before, type(now)(0))  # less: the process was moved to another cgroup


def read_dirty_limit_bytes(proc: Path = PROC) -> int | None:
    """Return how much page cache may wait to be written before the kernel slows who changes it.

    That is midway between vm.dirty_background_ratio and vm.dirty_ratio, of memory that is free or
    page cache now; None where the kernel does not tell.
    """
    try:
        text = (proc / "vmstat").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(nr_dirty_(?:background_)?threshold) (\d+)$", text, re.MULTILINE))
    if len(found) < 2:
        return None
    return sum(map(int, found.values())) // 2 * mmap.PAGESIZE


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


def _process_rooms(proc: Path, fields: dict[str, int]) -> Iterator[int]:
    """Yield what each limit of the process itself leaves."""
    try:
        text = (proc / "self/limits").read_text()
    except OSError:
        return
    for name, field in _RLIMITS.items():
        soft = re.search(rf"^Max {name}\s+(\d+)", text, re.MULTILINE)
        if soft:
            yield int(soft[1]) - fields.get(field, 0)
