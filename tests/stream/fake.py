"""A store in memory that remembers every transfer and can hold some of them back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from optstream.store.base import FrozenFile, WindowFile
from optstream.store.memory import Memory

WAIT_S = 20
"""After which something that never happens is a failure; no test needs it to pass."""

Event = tuple[str, int]
"""What ("read", "write") and which window."""


class FakeStore(Memory):
    """Windows move as with a drive, between two places in memory; frozen ones are never rewritten.

    Attributes:
        events: ended transfers of whole windows (they are smaller than a piece), in order.
        before: called at the start of each transfer, on its thread; it may wait.
    """

    in_place = False

    def __init__(self, num_drives: int = 1) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.num_bytes = {"read": 0, "write": 0}
        self.threads: dict[int, set[str]] = {drive: set() for drive in range(num_drives)}
        self.before: Callable[[str, int], None] = lambda verb, window: None
        self.changed = threading.Condition()
        self._fds: list[int] = []
        self._digests: list[dict[int, int]] = []
        self._frozen: set[int] = set()

    def reserve(self, files: Sequence[WindowFile]) -> None:
        super().reserve(files)
        for file in files:
            self._fds.append(-1)
            self._digests.append({})
            self._renew(len(self._fds) - 1, file)

    def _renew(self, window: int, file: WindowFile) -> None:
        self._fds[window] = os.memfd_create("fake")
        os.pwrite(self._fds[window], file.header, 0)
        header = -len(file.header)
        self._digests[window] = {header: xxhash.xxh3_64_intdigest(file.header)}

    def prepare_write(self, window: int) -> None:
        if window in self._frozen:
            self._frozen.remove(window)
            os.close(self._fds[window])
            self._renew(window, self.file(window))

    def freeze(self, windows: Iterable[int], *, room: bool = True) -> dict[int, FrozenFile]:
        frozen = {}
        for window in windows:
            self._frozen.add(window)
            file, digests = self.file(window), self._digests[window]
            fd = os.dup(self._fds[window])
            frozen[window] = FrozenFile(fd, "fake", len(file.header), file.data_bytes, digests)
        return frozen

    def close(self) -> None:
        super().close()
        while self._fds:
            os.close(self._fds.pop())

    @property
    def num_drives(self) -> int:
        return len(self.threads)

    def drive(self, window: int) -> int:
        return window % self.num_drives

    def read(self, window: int, offset: int, buffer: memoryview) -> None:
        self.before("read", window)
        super().read(window, offset, buffer)
        self._ended("read", window, len(buffer))

    def write(self, window: int, offset: int, buffer: memoryview) -> None:
        self.before("write", window)
        super().write(window, offset, buffer)
        os.pwrite(self._fds[window], buffer, len(self.file(window).header) + offset)
        self._digests[window][offset] = xxhash.xxh3_64_intdigest(buffer)
        self._ended("write", window, len(buffer))

    def _ended(self, verb: str, window: int, num_bytes: int) -> None:
        with self.changed:
            self.events.append((verb, window))
            self.num_bytes[verb] += num_bytes
            self.threads[self.drive(window)].add(threading.current_thread().name)
            self.changed.notify_all()

    def take(self, verb: str) -> list[int]:
        """Return the windows of ended transfers and forget those."""
        with self.changed:
            taken = [window for what, window in self.events if what == verb]
            self.events = [event for event in self.events if event[0] != verb]
        return taken

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "it never happened"


class Watched(torch.optim.SGD):
    """SGD with momentum; `during` is called in each update, with its number in the step."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.during: Callable[[int], None] = lambda number: None
        self.calls: list[int] = []  # one object: plain attributes change once a step

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        return True

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].device.type == "cpu":  # else the plan looks for shapes
            self.calls.append(len(self.calls))
            self.during(self.calls[-1])
        return super().step(closure)


def one_param_a_window(num_windows: int) -> list[nn.Parameter]:
    """Return parameters whose momentum fills a window of 64 KiB each."""
    params = [nn.Parameter(torch.full((128, 128), 0.5)) for _ in range(num_windows)]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    return params
