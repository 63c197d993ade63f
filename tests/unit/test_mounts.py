"""The kernel's mount table."""

from __future__ import annotations

from pathlib import Path

from optstream.mounts import Mount, find_mount, read_mounts

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
28 27 254:1 /sub/dir /mnt/a\040b\134c rw,noatime shared:3 master:1 - ext4 /dev/vda1 rw,discard
29 27 0:30 / /merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
30 27 0:31 / /odd rw - fuse.x \040 rw
"""


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(TABLE.lstrip())
    mounts = read_mounts(tmp_path)
    assert mounts[28] == Mount("/sub/dir", "/mnt/a b\\c", "ext4", ("rw", "discard"), "/dev/vda1")
    assert mounts[29].options[2] == "upperdir=/u"
    assert (mounts[22].kind, mounts[30].kind) == ("proc", "fuse.x")


def test_no_table(tmp_path: Path) -> None:
    assert read_mounts(tmp_path) == {}


def test_this_machine(tmp_path: Path) -> None:
    mount = find_mount(Path("/proc"))
    assert mount is not None
    assert (mount.kind, mount.point) == ("proc", "/proc")
    assert find_mount(tmp_path / "missing") is None
