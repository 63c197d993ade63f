"""What the doctor advises, from figures that are given here."""

from __future__ import annotations

import pytest

from optstream.doctor.advice import Settings, find_warnings, settings_for, striping
from optstream.doctor.bandwidth import Bandwidth, Cell
from optstream.doctor.disks import Disk
from optstream.doctor.probe import Abilities
from optstream.mounts import Mount
from optstream.plan import NUM_SLOTS, OVERHEAD_BYTES
from optstream.store.base import PIECE_BYTES

GIB = 2**30
ABLE = Abilities(
    direct_io=True,
    align_bytes=512,
    reserves=True,
    nameless=True,
    links=True,
    reflinks=False,
    announced=(),
)


def bandwidth(**rates: float) -> Bandwidth:
    """Return what was measured, from mixed bytes/s by threads ("t4")."""
    cells = [Cell("mixed", PIECE_BYTES, int(key[1:]), rate) for key, rate in rates.items()]
    cells += [Cell("mixed", 2**20, 8, 9e9), Cell("read", PIECE_BYTES, 8, 9e9)]
    return Bandwidth(2**29, 1e9, tuple(cells))


def disk(name: str, backing_file: str = "") -> Disk:
    return Disk(name, "", 2**40, 512, rotational=False, backing_file=backing_file)


def settings(rate: float | None) -> Settings:
    return Settings("direct", 2**28, 4, rate, ())


@pytest.mark.parametrize(
    ("rates", "threads", "rate"),
    [
        ({"t1": 1e9, "t2": 1.97e9, "t4": 2e9, "t8": 1.9e9}, 2, 1.97e9),
        ({"t1": 1e9, "t2": 1.8e9, "t4": 1.9e9, "t8": 2.5e9}, 8, 2.5e9),
        ({"t1": 1e8}, 1, 1e8),
    ],
)
def test_the_fewest_threads_that_are_nearly_the_fastest(
    rates: dict[str, float], threads: int, rate: float
) -> None:
    found = settings_for(bandwidth(**rates), 64 * GIB)
    assert (found.io_threads, found.bytes_per_s) == (threads, rate)


@pytest.mark.parametrize("measured", [None, bandwidth()])
def test_defaults_where_nothing_was_measured(measured: Bandwidth | None) -> None:
    found = settings_for(measured, 64 * GIB)
    assert (found.io_threads, found.bytes_per_s) == (4, None)
    assert (found.store, found.window_bytes) == ("direct", 256 * 2**20)


@pytest.mark.parametrize(
    ("available", "window_mib"), [(64, 256), (4.2, 256), (4, 128), (1, 32), (0.1, 8), (0, 8)]
)
def test_windows_take_a_quarter_of_the_memory(available: float, window_mib: int) -> None:
    found = settings_for(None, int(available * GIB))
    assert found.window_bytes == window_mib * 2**20
    if window_mib > 8:
        assert NUM_SLOTS * found.window_bytes + OVERHEAD_BYTES <= available * GIB / 4


def test_nothing_to_warn_of() -> None:
    mount = Mount("/", "/mnt", "ext4", ("rw",), "/dev/nvme0n1")
    assert list(find_warnings(mount, [disk("nvme0n1")], ABLE)) == []
    assert list(find_warnings(None, [], ABLE)) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("overlay", "container"),
        ("nfs4", "network"),
        ("lustre", "network"),
        ("fuse.sshfs", "network"),
        ("fuse.ext4", "process of its own"),
        ("fuseblk", "process of its own"),
    ],
)
def test_filesystems_to_be_wary_of(kind: str, text: str) -> None:
    (warning,) = find_warnings(Mount("/", "/mnt", kind, ()), [], ABLE)
    assert text in warning
    assert kind in warning


def test_devices_to_be_wary_of() -> None:
    assert "RAM" in next(find_warnings(None, [disk("zram0")], ABLE))
    assert "/images/a" in next(find_warnings(None, [disk("loop0", "/images/a")], ABLE))


def test_one_directory_is_not_striped() -> None:
    assert striping(["/a"], [[disk("sda")]], [settings(1e9)]) == []


def test_two_directories_on_one_drive() -> None:
    drives = [[disk("sda")], [disk("sdb")], [disk("sda"), disk("sdc")]]
    (text,) = striping(["/a", "/b", "/c"], drives, [settings(1e9)] * 3)
    assert text == "/a and /c are on one drive, sda: striping over them gains nothing; give one"


def test_alike_drives_are_striped() -> None:
    (text,) = striping(["/a", "/b"], [[disk("sda")], [disk("sdb")]], [settings(2e9), settings(3e9)])
    assert text.startswith('directory=["/a", "/b"]: 4.00 GB/s together')


def test_a_slow_drive_would_hold_up_a_fast_one() -> None:
    (text,) = striping(["/a", "/b"], [[disk("sda")], [disk("sdb")]], [settings(1e9), settings(3e9)])
    assert text.startswith("give /b alone: 3.00 GB/s")
    assert "2.00 GB/s" in text


def test_drives_that_were_not_measured() -> None:
    (text,) = striping(["/a", "/b"], [[], []], [settings(None), settings(1e9)])
    assert (
        text == 'directory=["/a", "/b"] stripes windows over them; what that gains was not measured'
    )
