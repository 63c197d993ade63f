"""Fixtures for stores: a directory on a drive, mounted filesystem images, children to kill."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import optstream
from optstream.mounts import find_mount
from optstream.store import WindowFile, open_store
from optstream.store.base import Store
from store.holder import HOLDER

HEADER = b"header".ljust(4096)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def pages() -> Callable[..., memoryview]:
    """Return a function that makes page-aligned buffers, filled with a byte each page."""

    def make(num_pages: int, fill: int = 0) -> memoryview:
        buffer = memoryview(
            mmap.mmap(-1, num_pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        buffer[:] = b"".join(bytes([(fill + i) % 256]) * 4096 for i in range(num_pages))
        return buffer

    return make


@pytest.fixture
def windows() -> Callable[..., list[WindowFile]]:
    """Return a function that describes windows of so many pages each."""
    return lambda *num_pages: [WindowFile(HEADER, n * 4096) for n in num_pages]


@pytest.fixture
def drive_path(tmp_path: Path) -> Path:
    """A new, empty directory that is not in memory."""
    mount = find_mount(tmp_path)
    if mount is None or mount.kind in {"tmpfs", "ramfs"}:
        pytest.skip("the temporary directory is in memory; give pytest --basetemp on a drive")
    return tmp_path


@pytest.fixture(params=["direct", "mapped"])
def on_drive(request: pytest.FixtureRequest) -> str:
    """A kind of store whose windows are files."""
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Return `open_store`; what it opens is closed at the end, also of a failed test."""
    stores: list[Store] = []

    def open_(kind: str, directories: object) -> Store:
        stores.append(open_store(kind, directories))  # type: ignore[arg-type]
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that makes a filesystem and mounts it; unmounted also after a failure."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    points: list[Path] = []
    loops: list[str] = []

    def mount(
        kind: str,
        *options: str,
        source: object = "none",
        mib: int = 64,
        sector: int = 512,
        mkfs: str = "",
    ) -> Path:
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        try:
            image = tmp_path / f"image{len(points)}"
            image.touch()
            os.truncate(image, mib << 20)
            if kind == "fuse.ext4":
                run("mkfs.ext4", "-q", str(image))
                run("fuse2fs", str(image), str(point), "-o", "rw")
                points.append(point)
                return point
            if kind in {"ext3", "ext4", "xfs", "btrfs"}:
                loop = ("losetup", "--find", "--show", "--sector-size", str(sector), str(image))
                loops.append(run(*loop))
                source = loops[-1]
                run(f"mkfs.{kind}", "-q", *mkfs.split(), str(source))
            flags = ["-o", ",".join(options)] if options else []
            run("mount", "-t", kind, *flags, str(source), str(point))
        except FileNotFoundError as error:
            pytest.skip(f"{error.filename} is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount {kind} here: {error.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        run("umount", "--lazy", str(point))
    for loop in loops:
        run("losetup", "--detach", loop)


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts Python code in a process and waits for its line "ready"."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        children.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in children:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


@pytest.fixture
def holder(
    child: Callable[..., subprocess.Popen[str]], drive_path: Path, on_drive: str
) -> Callable[[str], subprocess.Popen[str]]:
    """Return a function that starts a HOLDER in the directory."""
    return lambda names: child(HOLDER, drive_path, names, *optstream.__path__, on_drive)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function after which `os.open` with certain flags fails with an errno."""

    def arrange(flags: int, number: int) -> None:
        real = os.open

        def open_(path: str, asked: int, *args: int, **more: int) -> int:
            if asked & flags == flags:
                raise OSError(number, os.strerror(number))
            return real(path, asked, *args, **more)

        monkeypatch.setattr(os, "open", open_)

    return arrange


@pytest.fixture
def open_files() -> Callable[[Path], list[str]]:
    """Return a function that lists what this process holds open below a directory."""

    def find(path: Path) -> list[str]:
        links = []
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(fd.readlink()))
        return [link for link in links if link.startswith(f"{path}/")]

    return find
