"""A training run that kills itself at one call of the kernel; run as a process by the tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint.runs import go_on, streamed, weights

CALLS = (
    "open",
    "link",
    "fsync",
    "mkdir",
    "rename",
    "pwritev",
    "rmdir",
    "unlink",
    "posix_fallocate",
)
"""What a save does to the filesystem; shutil.rmtree unlinks and removes through these."""


class Killer:
    """Kills the process at the n-th call: before it, or when its effect is there."""

    def __init__(self, at: int, before: bool) -> None:
        self.at, self.before = at, before
        self.num_calls = 0
        self.armed = False
        self._lock = threading.Lock()

    def wrap(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.armed:
                return real(*args, **kwargs)
            with self._lock:
                number, self.num_calls = self.num_calls, self.num_calls + 1
                if number == self.at and self.before:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return real(*args, **kwargs)
                finally:
                    if number == self.at:
                        os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, call)


def without_exchange(monkey: Any) -> None:
    """Take away what not every filesystem has: exchanging two names."""
    monkey.exchange = lambda one, other: False


def save_and_die(root: Path, killer: Killer, older: bool, exchange: bool) -> None:
    """Step and save, over an older checkpoint or for the first time; killed at one call."""
    from optstream import durable

    if not exchange:
        without_exchange(durable)
    params, optimizer = streamed(root / "live", shapes=((90, 130), (7,)))
    with optimizer:
        go_on(params, optimizer, range(2))
        if older:
            optimizer.save(root / "checkpoint")
            torch.save(weights(params), root / "older.pt")
        optimizer._state.stream.drain()  # else it is chance which calls that step still makes
        killer.armed = True
        go_on(params, optimizer, [2])  # whose writes the save finds under way
        torch.save(weights(params), root / "newer.pt")
        optimizer.save(root / "checkpoint")
        killer.armed = False


def main(argv: list[str]) -> None:
    """Fork one child a call until a save is through; print how many calls it made.

    The children are forked before torch has started a thread, which is much faster than new ones.
    """
    root, older, exchange, before = Path(argv[0]), argv[1] == "1", argv[2] == "1", argv[3] == "1"
    torch.set_num_threads(1)
    warm_up(root)
    at = 0
    while True:
        place = root / f"{at:04d}"
        place.mkdir()
        child = os.fork()
        if child == 0:
            run_child(lambda place=place, at=at: one(place, Killer(at, before), older, exchange))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"call {at}: exit status {status}"
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        at += 1
    sys.stdout.write(f"{at}\n")


def warm_up(root: Path) -> None:
    """Import now what torch imports late, so that no child has to; no thread may be left."""
    params, optimizer = streamed(root / "live", store="memory")
    with optimizer:
        go_on(params, optimizer, range(2))
        torch.save(weights(params), root / "warm.pt")
        optimizer.save(root / "warm")


def one(place: Path, killer: Killer, older: bool, exchange: bool) -> None:
    for name in CALLS:
        killer.wrap(os, name)
    save_and_die(place, killer, older, exchange)


def run_child(call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
