"""What the kernel says about memory, from trees like those of real machines."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.memory import MemoryUse, read_available_bytes, read_memory

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


def test_this_process() -> None:
    before = read_memory()
    memory = mmap.mmap(-1, 32 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    grown_bytes = read_memory().anon_bytes - before.anon_bytes
    assert 31 * 2**20 < grown_bytes < 100 * 2**20
    assert read_memory().file_bytes > 0
    assert read_available_bytes() > 0
