"""Whole transfers: what the kernel does in part is done to the end, or is an error with numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from errno import EAGAIN, EIO

from optstream.errors import WindowIOError, WindowReadError, WindowWriteError
from optstream.units import PAGE_BYTES

# 1 + 2 + 4 + ... ms: a drive that is busy for longer than half a second is not merely busy
_MAX_STALLS = 9


def read_whole(fd: int, buffer: memoryview, position: int, filename: str) -> None:
    """Fill `buffer` from `position` of a file. Alignment and errors as in `Store.read`."""
    _transfer(
        lambda part, at: os.preadv(fd, [part], at), buffer, position, filename, WindowReadError
    )


def write_whole(fd: int, buffer: memoryview, position: int, filename: str) -> None:
    """Write `buffer` at `position` of a file. Alignment and errors as in `Store.write`."""
    _transfer(
        lambda part, at: os.pwritev(fd, [part], at), buffer, position, filename, WindowWriteError
    )


def _transfer(
    call: Callable[[memoryview, int], int],
    buffer: memoryview,
    position: int,
    filename: str,
    error: type[WindowIOError],
) -> None:
    """Repeat `call` until all of `buffer` is transferred.

    A short transfer goes on from the last page boundary, which is where direct I/O can. Busy
    (EAGAIN) and transfers of less than a page are tried again a few times; all else is an error at
    once, EIO too, because the kernel has retried it already.
    """
    done = stalls = 0
    while done < len(buffer):
        at, rest = position + done, len(buffer) - done
        try:
            moved = call(buffer[done:], at)
        except InterruptedError:
            continue
        except OSError as failure:
            if failure.errno != EAGAIN or stalls == _MAX_STALLS:
                raise error(filename, at, rest, failure.errno or EIO) from failure
            moved = 0
        else:
            if moved == 0 or stalls == _MAX_STALLS:
                cause = f"the kernel stopped after {moved} bytes; was the file truncated?"
                raise error(filename, at, rest, EIO, cause)
        progress = moved - moved % PAGE_BYTES
        done += progress
        if progress == 0:
            time.sleep(0.001 * 2**stalls)
        stalls = 0 if progress else stalls + 1
