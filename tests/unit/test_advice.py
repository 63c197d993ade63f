"""What the doctor advises, from figures that are given here."""

from __future__ import annotations

import pytest

from optstream.doctor.advice import Settings, find_warnings, settings_for
from optstream.doctor.bandwidth import Bandwidth, Cell
from optstream.doctor.choice import Choice, choose
from optstream.doctor.disks import Disk
from optstream.doctor.probe import Abilities
from optstream.doctor.report import DirectoryReport, Filesystem
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


def report(
    path: str, drive: str, rate: float | None, *, free: int = 2**40, refusal: str | None = None
) -> DirectoryReport:
    settings = Settings("direct", 2**28, 2 if path == "/a" else 8, rate, ())
    return DirectoryReport(
        path=path,
        tested=path,
        refusal=refusal,
        filesystem=Filesystem("ext4", "/dev/" + drive, path, free, None),
        disks=(disk(drive),),
        abilities=ABLE,
        bandwidth=None,
        conduct=(),
        settings=None if refusal else settings,
        warnings=(),
    )


def test_no_directory_is_usable() -> None:
    assert choose([report("/a", "sda", None, refusal="tmpfs")]) is None


def test_one_directory_is_usable() -> None:
    choice = choose([report("/a", "sda", None, refusal="tmpfs"), report("/b", "sda", 1e9)])
    assert choice == Choice(("/b",), 1e9, 2**40, 2**28, 8, ())


def test_alike_drives_are_striped() -> None:
    choice = choose([report("/a", "sda", 2e9, free=10 * GIB), report("/b", "sdb", 3e9)])
    assert choice is not None
    assert choice.directories == ("/a", "/b")
    assert (choice.bytes_per_s, choice.free_bytes, choice.io_threads) == (4e9, 20 * GIB, 8)
    assert choice.reasons == (
        "the fastest alone moves 3.00 GB/s, all 4.00: the slowest sets the pace",
    )


def test_a_slow_drive_would_hold_up_a_fast_one() -> None:
    choice = choose([report("/a", "sda", 1e9), report("/b", "sdb", 3e9)])
    assert choice is not None
    assert (choice.directories, choice.bytes_per_s) == (("/b",), 3e9)
    assert "2.00 GB/s, /b alone moves 3.00" in choice.reasons[0]


def test_directories_on_one_drive_are_not_striped() -> None:
    choice = choose([report(p, d, 1e9) for p, d in (("/a", "sda"), ("/b", "sdb"), ("/c", "sda"))])
    assert choice is not None
    assert choice.directories == ("/a", "/b")
    assert choice.reasons[0] == ("/c is on sda as /a is: striping over both gains nothing")


def test_drives_that_were_not_measured() -> None:
    choice = choose([report("/a", "sda", None), report("/b", "sdb", 1e9)])
    assert choice is not None
    assert (choice.directories, choice.bytes_per_s) == (("/a", "/b"), None)
