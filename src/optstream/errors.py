"""Every error a user can meet; `OffloadError` is the base of all of them.

A message names the subject with its numbers and units, the cause, and the next action. Each class
also derives from the built-in exception a caller would expect, so `except ValueError` or `except
OSError` work.
"""

from __future__ import annotations

import errno
import os


class OffloadError(Exception):
    """Base of every error that optstream raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """An argument that cannot be used: a size, a path, an option, a rule that does not fit."""


class UnsupportedOptimizerError(OffloadError, TypeError):
    """An optimizer whose state cannot be streamed window by window; the message says why."""


class ModelChangedError(OffloadError, RuntimeError):
    """A parameter no longer has the shape, dtype or device that its stored state was made for."""


class StateChangedError(OffloadError, RuntimeError):
    """The wrapped optimizer changed its state in a way that streaming cannot follow."""


class OffloadedError(OffloadError, RuntimeError):
    """The wrapped optimizer was called where only the one that `offload` returned has the state."""


class ClosedError(OffloadError, RuntimeError):
    """The optimizer was closed; its files are gone."""


class StoreError(OffloadError, OSError):
    """A directory or drive that cannot hold the state; `errno` is set where the kernel gave one."""

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())


class OutOfSpaceError(StoreError):
    """The drive has fewer free bytes than the state needs."""


class FormatError(OffloadError, ValueError):
    """A window file that is malformed or not ours; the message names file and fault."""


class WindowIOError(StoreError):
    """A transfer of a window failed.

    Attributes:
        filename: what identifies the file (nameless files: the directory and the window).
        offset: position in the file, bytes.
        num_bytes: bytes that were asked for and not transferred.
        errno: the kernel's error number.
        window: of the plan, once known.
        progress: what it holds and how far the step came, once known.
    """

    verb = "transfer"
    advice = "check the drive (dmesg, SMART)"

    def __init__(
        self, filename: str, offset: int, num_bytes: int, number: int, cause: str = ""
    ) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        reason = cause or os.strerror(number)
        text = (
            f"cannot {self.verb} {num_bytes} bytes at offset {offset} of {filename}: "
            f"{reason} (errno {number}); {self.advice}"
        )
        super().__init__(number, text)
        self.filename = filename
        self.window: int | None = None
        self.progress = ""

    def __str__(self) -> str:
        return f"{self.strerror}; {self.progress}" if self.progress else str(self.strerror)


class WindowReadError(WindowIOError):
    """A window could not be read; nothing of it was changed."""

    verb = "read"


class DigestError(WindowReadError):
    """Bytes of a checkpoint are not those that were written."""

    advice = "the file was changed or its drive is faulty: load another checkpoint"

    def __init__(self, filename: str, offset: int, num_bytes: int) -> None:
        super().__init__(filename, offset, num_bytes, errno.EIO, "their digest does not fit")


class WindowWriteError(WindowIOError):
    """A window could not be written; its newest bytes are still in memory."""

    verb = "write"
    advice = "its newest state is kept in memory: free space or mend the drive"


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint that is not whole, or does not fit this optimizer; what is wrong is named."""


class RankError(OffloadError, RuntimeError):
    """Another rank failed, or ranks do not agree; every rank knows, and none waits for another."""
