"""Block devices as sysfs shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from optstream.doctor.disks import Disk, find_disks
from optstream.mounts import Mount, find_mount


class Sysfs:
    """A tree like /sys in which a path's filesystem is on a device of choice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/block").mkdir(parents=True)

    def add(self, name: str, *, sector: int = 512, **files: str) -> Path:
        device = self.root / "devices" / name
        (device / "queue").mkdir(parents=True)
        (device / "size").write_text("2048\n")
        (device / "queue/logical_block_size").write_text(f"{sector}\n")
        (device / "queue/rotational").write_text("0\n")
        for file, text in files.items():
            path = device / file.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return device

    def holds(self, path: Path, device: Path) -> None:
        number = path.stat().st_dev
        link = self.root / f"dev/block/{os.major(number)}:{os.minor(number)}"
        link.symlink_to(device)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def test_a_partition_is_of_its_disk(sysfs: Sysfs, tmp_path: Path) -> None:
    disk = sysfs.add("nvme0n1", sector=4096, device__model="Fast 4TB  \n")
    (disk / "nvme0n1p2").mkdir()
    (disk / "nvme0n1p2/partition").write_text("2\n")
    sysfs.holds(tmp_path, disk / "nvme0n1p2")
    assert find_disks(tmp_path, None, sysfs.root) == (
        Disk("nvme0n1", "Fast 4TB", 2**20, 4096, rotational=False, backing_file=""),
    )


def test_raid_and_encryption_are_seen_through(sysfs: Sysfs, tmp_path: Path) -> None:
    disks = [sysfs.add(name) for name in ("sdb", "sda")]
    raid, crypt = sysfs.add("md0"), sysfs.add("dm-0")
    for upper, lower in ((crypt, raid), (raid, disks[0]), (raid, disks[1])):
        (upper / "slaves").mkdir(exist_ok=True)
        (upper / "slaves" / lower.name).symlink_to(lower)
    sysfs.holds(tmp_path, crypt)
    assert [disk.name for disk in find_disks(tmp_path, None, sysfs.root)] == ["sda", "sdb"]


def test_memory_and_files_that_look_like_drives(sysfs: Sysfs, tmp_path: Path) -> None:
    sysfs.holds(tmp_path, sysfs.add("loop3", loop__backing_file="/images/a\n"))
    (loop,) = find_disks(tmp_path, None, sysfs.root)
    assert (loop.backing_file, loop.in_memory) == ("/images/a", False)
    assert Disk("zram0", "", 0, 4096, rotational=False, backing_file="").in_memory


def test_nothing_is_known_of_a_network_filesystem(sysfs: Sysfs, tmp_path: Path) -> None:
    mount = Mount("/", "/mnt", "nfs4", (), "server:/export")
    assert find_disks(tmp_path, mount, sysfs.root) == ()
    assert find_disks(tmp_path / "missing", None, sysfs.root) == ()


def test_this_machine(tmp_path: Path) -> None:
    disks = find_disks(tmp_path, find_mount(tmp_path))
    assert all(disk.size_bytes > 0 and disk.sector_bytes >= 512 for disk in disks)
