"""What the kernel says about memory, from trees like those of real machines."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.cgroup import Group
from optstream.memory import (
    MemoryMeter,
    MemoryUse,
    read_available_bytes,
    read_dirty_limit_bytes,
    read_memory,
)

STATUS = """Name:\tpython
VmPeak:\t  900000 kB
VmRSS:\t    7000 kB
RssAnon:\t    4000 kB
RssFile:\t    2000 kB
RssShmem:\t    1000 kB
Threads:\t1
"""
MEMINFO = "MemTotal:  100000 kB\nMemFree: 10000 kB\nMemAvailable:  50000 kB\nSwapFree: 3000 kB\n"
GIB = 2**30
Tree = Callable[..., Path]


@pytest.fixture
def proc(tmp_path: Path) -> Tree:
    """Return a function that writes a /proc whose mount table points into `tmp_path`."""

    def write(cgroup: str | None, *mounts: str, limits: dict[str, str] | None = None) -> Path:
        own = tmp_path / "proc/self"
        own.mkdir(parents=True)
        (own / "status").write_text(STATUS)
        (tmp_path / "proc/meminfo").write_text(MEMINFO)
        if cgroup is not None:
            (own / "cgroup").write_text(cgroup)
            lines = [
                f"{30 + i} 25 0:{i} {mount.replace('$', str(tmp_path))}\n"
                for i, mount in enumerate(mounts)
            ]
            (own / "mountinfo").write_text("".join(lines))
        for name, text in (limits or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "proc"

    return write


V2 = "/ $/fs rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = "/ $/fs/memory rw - cgroup cgroup rw,memory"


def test_kinds_of_memory(proc: Tree) -> None:
    assert read_memory(proc(None)) == MemoryUse(4000 * 1024, 2000 * 1024, 1000 * 1024, None)


def test_a_kernel_without_kinds(proc: Tree) -> None:
    root = proc(None)
    (root / "self/status").write_text("VmRSS:\t    7000 kB\n")
    assert read_memory(root) == MemoryUse(7000 * 1024, 0, 0, None)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"a/b/memory.max": "max\n"}, None),
        ({"a/b/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        ({"a/b/memory.max": f"{4 * GIB}\n", "a/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        ({"a/b/memory.max": f"{4 * GIB}\n", "memory.max": f"{GIB}\n"}, GIB),
        ({"a/c/memory.max": f"{GIB}\n"}, None),
        ({"a/b/memory.max": "0\n"}, 0),
        ({"a/b/memory.max": ""}, None),
    ],
)
def test_cgroup_v2(proc: Tree, limits: dict[str, str], expected: int | None) -> None:
    files = {f"fs/{name}": text for name, text in limits.items()}
    assert read_memory(proc("0::/a/b\n", V2, limits=files)).limit_bytes == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b": "9223372036854771712\n", "a": "9223372036854771712\n"}, None),
        ({"a/b": "9223372036854710272\n"}, None),  # 64 KiB pages
        ({"a/b": f"{2 * GIB}\n", "a": "9223372036854771712\n"}, 2 * GIB),
        ({"a/b": "9223372036854771712\n", "a": f"{GIB}\n"}, GIB),
        ({"a/b": f"{GIB}\n", "a": f"{2 * GIB}\n"}, GIB),
    ],
)
def test_cgroup_v1(proc: Tree, limits: dict[str, str], expected: int | None) -> None:
    files = {f"fs/memory/{name}/memory.limit_in_bytes": text for name, text in limits.items()}
    own = "5:cpu,cpuacct:/x\n4:hugetlb,memory:/a/b\n"
    tree = proc(own, "/ $/fs/cpu rw - cgroup cgroup rw,cpu", V1, limits=files)
    assert read_memory(tree).limit_bytes == expected


def test_both_versions_at_once(proc: Tree) -> None:
    tree = proc(
        "4:memory:/a\n0::/b\n",
        V1,
        "/ $/fs/unified rw - cgroup2 cgroup2 rw",
        limits={"fs/memory/a/memory.limit_in_bytes": "5000", "fs/unified/b/memory.max": "6000"},
    )
    assert read_memory(tree).limit_bytes == 5000


def test_a_container_sees_its_own_part(proc: Tree) -> None:
    """Without a cgroup namespace the path is the host's and the mount shows a part of it."""
    tree = proc(
        "0::/docker/abc/sub\n",
        "/docker/abc $/fs rw - cgroup2 cgroup2 rw",
        limits={"fs/memory.max": "7000", "fs/sub/memory.max": "max"},
    )
    assert read_memory(tree).limit_bytes == 7000


def test_a_path_that_the_mount_does_not_show(proc: Tree) -> None:
    tree = proc(
        "0::/elsewhere\n",
        "/docker/abc $/fs rw - cgroup2 cgroup2 rw",
        limits={"fs/memory.max": "7000"},
    )
    assert read_memory(tree).limit_bytes == 7000


def test_outside_of_the_namespace(proc: Tree) -> None:
    tree = proc("0::/../../other\n", V2, limits={"memory.max": "1", "other/memory.max": "1"})
    assert read_memory(tree).limit_bytes is None


def test_a_mount_point_with_a_space(proc: Tree) -> None:
    tree = proc(
        "0::/a\n",
        r"/ $/my\040fs rw - cgroup2 cgroup2 rw",
        limits={"my fs/a/memory.max": "8000"},
    )
    assert read_memory(tree).limit_bytes == 8000


def test_what_is_left(proc: Tree, tmp_path: Path) -> None:
    tree = proc("0::/a\n", V2, limits={"fs/a/memory.max": "max"})
    assert read_available_bytes(tree) == 53000 * 1024
    (tmp_path / "fs/a/memory.max").write_text(str(9000 * 1024))
    assert read_available_bytes(tree) == 4000 * 1024  # 9000 less 4000 anonymous, 1000 shared
    (tmp_path / "fs/a/memory.max").write_text(str(100 * 1024))
    assert read_available_bytes(tree) == 0


STAT_V1 = """cache 1
rss 1
shmem 1
total_cache 700
total_rss 300
total_shmem 200
"""
STAT_V2 = """anon 300
file 700
kernel_stack 16
shmem 200
file_mapped 5
slab_reclaimable 40
"""


def group_v1(path: str, limit: object, used: int) -> dict[str, str]:
    return {
        f"fs/memory/{path}memory.limit_in_bytes": f"{limit}\n",
        f"fs/memory/{path}memory.usage_in_bytes": f"{used}\n",
        f"fs/memory/{path}memory.stat": STAT_V1,
        f"fs/memory/{path}memory.failcnt": "12\n",
        f"fs/memory/{path}memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }


def group_v2(path: str, limit: object, used: int) -> dict[str, str]:
    return {
        f"fs/{path}memory.max": f"{limit}\n",
        f"fs/{path}memory.current": f"{used}\n",
        f"fs/{path}memory.stat": STAT_V2,
        f"fs/{path}memory.events": "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\n",
    }


PRESSURE = "some avg10=1.50 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=1\n"


@pytest.mark.parametrize(
    ("own", "mount", "group", "slab_bytes"),
    [("4:memory:/a/b\n", V1, group_v1, None), ("0::/a/b\n", V2, group_v2, 40)],
)
def test_the_group_that_binds(
    proc: Tree, own: str, mount: str, group: Group, slab_bytes: int | None
) -> None:
    files = {**group("a/b/", "max", 900), **group("a/", 2000, 1100)}
    files |= {"fs/a/b/memory.pressure": PRESSURE.format(2500000)}
    files |= {"proc/pressure/memory": PRESSURE.format(7000000)}
    use = read_memory(proc(own, mount, limits=files))
    assert use.limit_bytes == 2000
    assert use.group == Group(2000, 1100, 300, 500, 200, slab_bytes, limit_hits=12, oom_kills=3)
    assert use.stalled_s == (2.5 if mount is V2 else 7.0)


def test_without_a_limit_the_own_group_is_told(proc: Tree) -> None:
    files = {**group_v2("a/b/", "max", 900), **group_v2("a/", "max", 1100)}
    use = read_memory(proc("0::/a/b\n", V2, limits=files))
    assert use.limit_bytes is None
    assert use.group is not None
    assert use.group.used_bytes == 900
    assert use.stalled_s is None


def test_a_hierarchy_without_the_memory_controller(proc: Tree) -> None:
    files = {**group_v1("a/", 5000, 900), "fs/unified/b/memory.pressure": PRESSURE.format(1)}
    tree = proc("4:memory:/a\n0::/b\n", "/ $/fs/unified rw - cgroup2 c rw", V1, limits=files)
    use = read_memory(tree)
    assert use.group is not None
    assert (use.limit_bytes, use.group.used_bytes, use.stalled_s) == (5000, 900, 1e-6)


@pytest.mark.parametrize(
    ("limit", "used", "above_limit", "above_used", "expected"),
    [
        (4000, 1000, "max", 9000, 4000 - (1000 - 540)),
        (4000, 1000, 4100, 4000, 4100 - (4000 - 540)),  # others in the parent leave less
        (4000, 1000, 300, 1000, 0),
        (4000, 100, "max", 100, 4000),  # never more than the limit
    ],
)
def test_what_groups_leave_when_page_cache_is_reclaimed(
    proc: Tree, limit: int, used: int, above_limit: object, above_used: int, expected: int
) -> None:
    files = {**group_v2("a/b/", limit, used), **group_v2("a/", above_limit, above_used)}
    assert read_available_bytes(proc("0::/a/b\n", V2, limits=files)) == expected


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {}            unlimited            bytes
Max stack size            8388608              unlimited            bytes
Max address space         {}            unlimited            bytes
"""


@pytest.mark.parametrize(
    ("data", "space", "expected_kib"),
    [
        ("unlimited", "unlimited", 53000),
        (8000 * 1024, "unlimited", 2000),
        ("unlimited", 905000 * 1024, 5000),
        (8000 * 1024, 901000 * 1024, 1000),
        (1, "unlimited", 0),
    ],
)
def test_limits_of_the_process_itself(
    proc: Tree, data: object, space: object, expected_kib: int
) -> None:
    tree = proc(None, limits={"proc/self/limits": LIMITS.format(data, space)})
    (tree / "self/status").write_text(STATUS + "VmSize:\t 900000 kB\nVmData:\t 6000 kB\n")
    assert read_available_bytes(tree) == expected_kib * 1024


def test_the_limit_on_dirty_pages(proc: Tree) -> None:
    tree = proc(None)
    assert read_dirty_limit_bytes(tree) is None
    text = "nr_dirty 7\nnr_dirty_threshold 3000\nnr_dirty_background_threshold 1000\n"
    (tree / "vmstat").write_text(text)
    assert read_dirty_limit_bytes(tree) == 2000 * mmap.PAGESIZE
    (tree / "vmstat").write_text("nr_dirty 7\n")
    assert read_dirty_limit_bytes(tree) is None


def test_records_tell_what_has_happened_since_the_last(
    proc: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {**group_v2("a/", 2**20, 1000), "fs/a/memory.pressure": PRESSURE.format(1000000)}
    tree = proc("0::/a\n", V2, limits=files)
    monkeypatch.setattr("optstream.memory.read_memory", lambda: read_memory(tree))
    meter = MemoryMeter()
    (tmp_path / "fs/a/memory.events").write_text("max 20\noom_kill 4\n")
    (tmp_path / "fs/a/memory.pressure").write_text(PRESSURE.format(1250000))
    record = meter.read()
    assert (record.limit_hits, record.oom_kills, record.memory_stall_s) == (8, 1, 0.25)
    assert (record.group_anon_bytes, record.group_file_bytes) == (300, 500)
    assert record.describe_memory() == (
        "anonymous memory 3.9 MiB, file 2.0 MiB, shared 1000.0 KiB, limit 1.0 MiB, "
        "0.25 s short of memory"
    )
    (tmp_path / "fs/a/memory.events").write_text("max 1\n")  # of another cgroup
    record = meter.read()
    assert (record.limit_hits, record.oom_kills, record.memory_stall_s) == (0, None, 0.0)


def test_this_process() -> None:
    before = read_memory()
    memory = mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    grown_bytes = read_memory().anon_bytes - before.anon_bytes
    assert 31 * 2**20 < grown_bytes < 100 * 2**20
    assert read_memory().file_bytes > 0
    assert read_available_bytes() > 0
