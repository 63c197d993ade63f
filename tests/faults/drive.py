"""A drive that fails on demand; what a closed optimizer must not leave."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def assert_nothing_left(directory: Path) -> None:
    assert not directory.exists() or list(directory.iterdir()) == []
    assert open_files(directory) == []
    assert drive_threads() == []


def drive_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "optstream" in thread.name]


def open_files(directory: Path) -> list[str]:
    """Return what this process has open in a directory, nameless files included."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(str(fd.readlink()))
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
