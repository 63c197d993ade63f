"""`optstream doctor` says what `offload` then does, on real filesystems, and leaves nothing."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.doctor import bandwidth
from optstream.doctor.bandwidth import MODES, PIECES_BYTES, THREADS, measure
from optstream.doctor.probe import find_abilities
from optstream.doctor.report import Limits, examine
from optstream.errors import StoreError
from optstream.store import WindowFile, linux
from optstream.store.base import Store
from optstream.store.live import LiveFile

Windows = Callable[..., list[WindowFile]]
Mounted = Callable[..., Path]
Opened = Callable[..., Store]
Refuse = Callable[[int, int], None]

LIMITS = Limits(64 * 2**30, None, None, None)
SHORT_S = 0.002


def contents(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize(
    ("kind", "options", "size", "facts"),
    [
        ("ext4", [], {}, {}),
        ("ext4", [], {"sector": 4096}, {}),
        ("ext4", ["data=journal"], {}, {"direct_io": False}),
        ("ext3", [], {}, {"reserves": False}),
        ("xfs", [], {"mib": 320}, {"reflinks": True}),
        ("btrfs", [], {"mib": 160}, {"reflinks": True}),
        ("fuse.ext4", [], {}, {"nameless": False, "reflinks": None}),
    ],
)
def test_it_says_what_offload_then_does(
    kind: str,
    options: list[str],
    size: dict[str, int],
    facts: dict[str, bool],
    mounted: Mounted,
    opened: Opened,
    windows: Windows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    point = mounted(kind, *options, **size)
    before = contents(point)
    report = examine(point / "new" / "state", LIMITS, None)
    assert contents(point) == before
    assert (report.refusal, report.tested) == (None, str(point))
    assert caplog.messages == []
    abilities = report.abilities
    assert abilities is not None
    wanted = {"direct_io": True, "reserves": True, "nameless": True, "reflinks": False, **facts}
    assert {name: getattr(abilities, name) for name in wanted} == wanted

    store = opened("direct", point / "new" / "state")
    store.reserve(windows(256))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    at = str(point / "new" / "state")
    assert [text.replace(str(point), at, 1) for text in abilities.announced] == said
    file = store._held.live[0]  # type: ignore[attr-defined]
    assert (file.direct, file.path is None) == (abilities.direct_io, abilities.nameless)


def test_facts_of_the_drive(mounted: Mounted) -> None:
    point = mounted("ext4", sector=4096)
    report = examine(point, LIMITS, None)
    assert report.filesystem is not None
    assert (report.filesystem.kind, report.filesystem.point) == ("ext4", str(point))
    free = os.statvfs(point)
    assert report.filesystem.free_bytes == free.f_bavail * free.f_frsize
    (disk,) = report.disks
    assert report.filesystem.source == f"/dev/{disk.name}"
    assert disk.sector_bytes == 4096
    assert disk.backing_file.endswith("/image0")
    assert any(disk.backing_file in warning for warning in report.warnings)
    assert report.abilities is not None
    assert report.abilities.align_bytes in (None, 4096)  # None: kernels before 6.1


def test_btrfs_is_on_a_drive_too(mounted: Mounted) -> None:
    (disk,) = examine(mounted("btrfs", mib=160), LIMITS, None).disks
    assert disk.name.startswith("loop")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "read-only", "overlay", "file", "link"])
def test_it_refuses_in_the_words_of_offload(
    kind: str, mounted: Mounted, opened: Opened, tmp_path: Path
) -> None:
    if kind == "read-only":
        path = mounted("ext4", "ro") / "state"
    elif kind == "overlay":
        layer = mounted("tmpfs")
        for name in ("lower", "upper", "work"):
            (layer / name).mkdir()
        layers = (f"lowerdir={layer}/lower", f"upperdir={layer}/upper", f"workdir={layer}/work")
        path = mounted("overlay", *layers)
    elif kind == "file":
        path = tmp_path / "file" / "state"
        path.parent.touch()
    elif kind == "link":
        path = tmp_path / "link"
        path.symlink_to("nowhere")
    else:
        path = mounted(kind) / "a" / "b"
    report = examine(path, LIMITS, lambda done, total: None)
    with pytest.raises(StoreError) as caught:
        opened("direct", path).reserve([])
    assert report.refusal == str(caught.value)
    assert (report.usable, report.settings, report.abilities) == (False, None, None)


def test_a_container_layer_is_warned_of(mounted: Mounted) -> None:
    layer = mounted("ext4")
    for name in ("lower", "upper", "work"):
        (layer / name).mkdir()
    layers = (f"lowerdir={layer}/lower", f"upperdir={layer}/upper", f"workdir={layer}/work")
    report = examine(mounted("overlay", *layers), LIMITS, None)
    assert report.usable
    assert any("container" in warning for warning in report.warnings)


def test_a_full_drive_is_refused(mounted: Mounted) -> None:
    point = mounted("ext4")
    free = os.statvfs(point)
    with (point / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 512 * 1024)
    report = examine(point, LIMITS, lambda done, total: None)
    assert report.refusal is not None
    assert "a trial needs" in report.refusal


def test_a_drive_that_refuses_files(drive_path: Path, refuse: Refuse) -> None:
    refuse(os.O_CREAT, errno.EDQUOT)
    refuse(os.O_TMPFILE, errno.EDQUOT)
    report = examine(drive_path, LIMITS, None)
    assert report.refusal == (
        f"{drive_path} cannot hold the state: Disk quota exceeded; choose a directory on a drive"
    )


def test_files_that_cannot_be_linked(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(fd: int, target: Path) -> None:
        raise OSError(errno.EPERM, "")

    assert find_abilities(drive_path).links
    monkeypatch.setattr(linux, "link", link)
    report = examine(drive_path, LIMITS, None)
    assert report.abilities is not None
    assert not report.abilities.links
    assert any("checkpoint copies the state" in warning for warning in report.warnings)
    assert contents(drive_path) == []


@pytest.mark.parametrize("names", ["nameless", "named"])
def test_every_combination_is_measured_in_bounded_space(
    names: str, mounted: Mounted, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    if names == "named":
        refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    point = mounted("ext4", mib=640)
    free = os.statvfs(point)
    free_bytes = free.f_bavail * free.f_frsize
    before, told, least = contents(point), [], [free_bytes]

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        least.append(os.statvfs(point).f_bavail * free.f_frsize)

    found = measure(point, progress, SHORT_S)
    assert found is not None
    assert found.file_bytes == 32 * 2**20
    assert free_bytes / 16 < free_bytes - min(least) <= free_bytes / 8
    assert len(found.cells) == len(MODES) * len(PIECES_BYTES) * len(THREADS)
    assert all(cell.bytes_per_s > 0 for cell in found.cells)
    assert (told[0], told[-1]) == ((0, 36), (36, 36))
    assert contents(point) == before


def test_too_small_a_drive_is_not_measured(mounted: Mounted) -> None:
    report = examine(mounted("ext4"), LIMITS, lambda done, total: None)
    assert (report.usable, report.bandwidth) == (True, None)
    assert report.settings is not None
    assert report.settings.bytes_per_s is None


def test_a_slow_drive_ends_in_time(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LiveFile.write

    def slow(file: LiveFile, offset: int, buffer: memoryview) -> None:
        if offset >= 0:
            time.sleep(0.05)
        write(file, offset, buffer)

    monkeypatch.setattr(LiveFile, "write", slow)
    monkeypatch.setattr(bandwidth, "_FILL_S", 0.2)
    monkeypatch.setattr(bandwidth, "_TOTAL_S", 1.0)
    found = measure(drive_path, cell_s=0.1)
    assert found is not None
    assert 0 < found.file_bytes < 512 * 2**20
    assert 0 < len(found.cells) < 36
    assert found.rate("mixed", 2**20, 8) is None


def test_bytes_that_were_measured_moved(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"read": 0, "write": 0}
    real = {"read": LiveFile.read, "write": LiveFile.write}

    def counting(name: str) -> Callable[[LiveFile, int, memoryview], None]:
        def transfer(file: LiveFile, offset: int, buffer: memoryview) -> None:
            real[name](file, offset, buffer)
            moved[name] += len(buffer)

        return transfer

    for name in real:
        monkeypatch.setattr(LiveFile, name, counting(name))
    monkeypatch.setattr(bandwidth, "MAX_FILE_BYTES", 16 * 2**20)
    monkeypatch.setattr(bandwidth, "MODES", ("mixed",))
    monkeypatch.setattr(bandwidth, "PIECES_BYTES", (16 * 2**20,))
    monkeypatch.setattr(bandwidth, "THREADS", (2,))
    start = time.perf_counter()
    found = measure(drive_path, cell_s=0.1)
    elapsed_s = time.perf_counter() - start
    assert found is not None
    (cell,) = found.cells
    filled = 2 * 16 * 2**20
    mixed = moved["read"] + moved["write"] - filled
    assert abs(moved["read"] * 2 - mixed) <= 2 * 16 * 2**20
    assert cell.bytes_per_s * 0.1 <= mixed + 16 * 2**20 * 2
    assert cell.bytes_per_s >= mixed / elapsed_s
