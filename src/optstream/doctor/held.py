"""Which live processes hold window files on a filesystem, named or not, found in /proc.

A nameless file shows as `DIR/#INODE (deleted)` among the descriptors of the process that holds it.
That it is ours is read from the file itself: the start of a window's header.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from optstream.distributed.place import is_place
from optstream.format import starts_like_ours
from optstream.mounts import PROC
from optstream.store.claim import LOCK, of_claim

_DELETED = " (deleted)"
_SUFFIX = ".safetensors"
_HEAD_BYTES = 64


@dataclass(frozen=True)
class Holding:
    """What one process holds in one directory.

    Attributes:
        pid, user, command: of the process.
        directory: as that process sees it.
        locks: the claims in it, or the rank's place that it is, which the process has locked.
        num_files: window files, each counted once.
        nameless_bytes: on the drive, which df sees and du does not; free when the process ends.
        named_bytes: on the drive in files that have names as well (checkpoints, claims).
    """

    pid: int
    user: str
    command: str
    directory: str
    locks: tuple[str, ...]
    num_files: int
    nameless_bytes: int
    named_bytes: int


@dataclass(frozen=True)
class Held:
    """What live processes hold on a filesystem.

    Attributes:
        holdings: of processes that could be looked into.
        nameless_bytes: of all of them, a file that several processes hold counted once.
        num_hidden: processes that could not be looked into, because they are other users'.
    """

    holdings: tuple[Holding, ...]
    nameless_bytes: int
    num_hidden: int


@dataclass(frozen=True)
class _OpenFile:
    path: Path
    status: os.stat_result

    @property
    def directory(self) -> Path:
        if self.is_place:
            return self.path
        claim = of_claim(self.path)
        return claim.parent if claim else self.path.parent

    @property
    def is_place(self) -> bool:
        return S_ISDIR(self.status.st_mode) and is_place(self.path)

    @property
    def lock(self) -> Path | None:
        """What the process has locked by having this open."""
        if self.is_place:
            return self.path
        return of_claim(self.path) if self.path.name == LOCK else None

    @property
    def nameless_bytes(self) -> int:
        return 0 if self.lock or self.status.st_nlink else self.status.st_blocks * 512

    @property
    def named_bytes(self) -> int:
        return 0 if self.lock or not self.status.st_nlink else self.status.st_blocks * 512


def find_held(device: int, proc: Path = PROC) -> Held:
    """Return what live processes hold on a filesystem.

    Args:
        device: `st_dev` of the filesystem.
        proc: where procfs is mounted.
    """
    holdings: list[Holding] = []
    nameless: dict[int, int] = {}
    num_hidden = 0
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            # one descriptor of many: a snapshot holds a file twice
            files = {file.status.st_ino: file for file in _open_files(process, device)}
            holdings += _holdings(process, list(files.values()))
        except PermissionError:
            num_hidden += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        else:
            nameless |= {number: file.nameless_bytes for number, file in files.items()}
    return Held(tuple(holdings), sum(nameless.values()), num_hidden)


def _holdings(process: Path, files: Sequence[_OpenFile]) -> Iterator[Holding]:
    for directory in sorted({file.directory for file in files}):
        there = [file for file in files if file.directory == directory]
        yield Holding(
            pid=int(process.name),
            user=_user(process),
            command=_command(process),
            directory=str(directory),
            locks=tuple(sorted(str(file.lock) for file in there if file.lock)),
            num_files=sum(file.lock is None for file in there),
            nameless_bytes=sum(file.nameless_bytes for file in there),
            named_bytes=sum(file.named_bytes for file in there),
        )


def _open_files(process: Path, device: int) -> list[_OpenFile]:
    """Return the window files, and the locks of claims, that a process has open.

    A file that is reserved for a window's next write has no header yet: it is ours if the process
    holds a window of that size in the same directory.
    """
    known: list[_OpenFile] = []
    blank: list[_OpenFile] = []
    for fd in (process / "fd").iterdir():
        try:
            name = str(fd.readlink())
            file = _OpenFile(Path(name.removesuffix(_DELETED)), fd.stat())
            if file.status.st_dev != device:
                continue
            may_be_window = S_ISREG(file.status.st_mode) and name.endswith((_DELETED, _SUFFIX))
            head = _head(fd) if may_be_window else b"other"
        except (FileNotFoundError, PermissionError):
            continue  # closed just now; or of a mode that lets nobody read it
        if file.lock or starts_like_ours(head):
            known.append(file)
        elif not any(head):
            blank.append(file)
    windows = {(file.directory, file.status.st_size) for file in known if not file.lock}
    return known + [file for file in blank if (file.directory, file.status.st_size) in windows]


def _head(fd: Path) -> bytes:
    with open(fd, "rb", buffering=0) as file:
        return file.read(_HEAD_BYTES)


def _user(process: Path) -> str:
    number = process.stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)  # a container's


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().split(b"\0")
    return b" ".join(words).decode(errors="replace").strip()
