"""The block devices under a directory, from sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optstream.mounts import Mount

SYS = Path("/sys")
_SECTOR_BYTES = 512  # sysfs counts a device's size in these, whatever its sectors are


@dataclass(frozen=True)
class Disk:
    """A whole device, no partition of one.

    Attributes:
        name: the kernel's ("nvme0n1").
        model: what the drive says of itself; "" where it says nothing.
        size_bytes: of the whole device.
        sector_bytes: logical sectors, the least that it reads or writes.
        rotational: whether the kernel takes it for spinning; virtual drives often say so.
        backing_file: of a loop device; "" for all others.
    """

    name: str
    model: str
    size_bytes: int
    sector_bytes: int
    rotational: bool
    backing_file: str

    @property
    def in_memory(self) -> bool:
        """Tell whether it is no drive at all: RAM that looks like one."""
        return self.name.startswith(("zram", "ram"))


def find_disks(path: Path, mount: Mount | None, sys: Path = SYS) -> tuple[Disk, ...]:
    """Return the disks below an existing path, through partitions, RAID and encryption.

    Empty where there are none (network, FUSE) or sysfs does not tell. Of a filesystem that spans
    several devices by itself (btrfs) only the mounted one is known.

    Args:
        mount: of the path.
        sys: where sysfs is mounted.
    """
    for number in _device_numbers(path, mount):
        device = sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
        if device.exists():
            disks = {disk.name: disk for disk in _leaves(device.resolve())}
            return tuple(disks[name] for name in sorted(disks))
    return ()


def _device_numbers(path: Path, mount: Mount | None) -> Iterator[int]:
    with suppress(OSError):
        yield path.stat().st_dev
    # btrfs and overlay have an `st_dev` of their own
    if mount and mount.source.startswith("/dev/"):
        with suppress(OSError):
            yield Path(mount.source).stat().st_rdev


def _leaves(device: Path) -> Iterator[Disk]:
    if (device / "partition").exists():
        device = device.parent
    slaves = sorted((device / "slaves").glob("*"))
    for slave in slaves:
        yield from _leaves(slave.resolve())
    if not slaves:
        yield Disk(
            name=device.name,
            model=_read(device / "device/model"),
            size_bytes=int(_read(device / "size") or 0) * _SECTOR_BYTES,
            sector_bytes=int(_read(device / "queue/logical_block_size") or 0),
            rotational=_read(device / "queue/rotational") == "1",
            backing_file=_read(device / "loop/backing_file"),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
