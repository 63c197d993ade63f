"""A drive that fails on demand, and a guard against hanging."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from optstream.mounts import find_mount

GUARD_S = 120


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Fail a test that hangs: the alarm also ends waits for locks and for other threads."""

    def expire(*args: object) -> None:
        raise TimeoutError(f"still not done after {GUARD_S} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(GUARD_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory on a drive in which nothing may be left: no file, no descriptor, no thread."""
    mount = find_mount(tmp_path)
    if mount is None or mount.kind in {"tmpfs", "ramfs"}:
        pytest.skip("the temporary directory is in memory; give pytest --basetemp on a drive")
    path = tmp_path / "state"
    yield path
    assert_nothing_left(path)


def assert_nothing_left(directory: Path) -> None:
    assert not directory.exists() or list(directory.iterdir()) == []
    assert open_files(directory) == []
    assert drive_threads() == []


def drive_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "optstream" in thread.name]


def open_files(directory: Path) -> list[str]:
    """Return what this process has open in a directory, nameless files included."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return [link for link in links if link.startswith(f"{directory}/")]


@dataclass
class FaultyDrive:
    """Stands before os.preadv and os.pwritev once `watch` is called.

    Attributes:
        num_calls: transfers seen, by name ("preadv", "pwritev").
        first: number of the first call that fails, by name; all later ones do until `mend`.
        answer: what a failing call does instead: (real call, fd, buffer, position) -> bytes.
    """

    num_calls: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    answer: Callable[..., int] | None = None
    num_failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, name: str, real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        with self.lock:
            number = self.num_calls.get(name, 0)
            self.num_calls[name] = number + 1
            failing = name in self.first and number >= self.first[name]
            self.num_failures += failing
        if failing:
            assert self.answer is not None
            return self.answer(real, fd, buffers[0], at)
        return int(real(fd, buffers, at))

    def fail(self, name: str, first: int, answer: Callable[..., int]) -> None:
        self.first = {name: first}
        self.answer = answer

    def mend(self) -> None:
        self.first = {}


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FaultyDrive:
    faulty = FaultyDrive()
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def call(fd: int, buffers: Any, at: int, name: str = name, real: Any = real) -> int:
            return faulty.call(name, real, fd, buffers, at)

        monkeypatch.setattr(os, name, call)
    return faulty


def failing(number: int) -> Callable[..., int]:
    """Return an answer that is an error of the kernel."""

    def answer(*transfer: object) -> int:
        raise OSError(number, os.strerror(number))

    return answer


def short(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
    """Transfer one page, as a kernel may."""
    return real(fd, [buffer[:4096]], at)


class Interrupted:
    """EINTR at every second call."""

    def __init__(self) -> None:
        self.turn = False

    def __call__(self, real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
        self.turn = not self.turn
        if self.turn:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return real(fd, [buffer], at)
