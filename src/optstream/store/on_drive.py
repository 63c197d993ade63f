"""Windows in files on drives: what stores share whose windows outgrow memory.

A window's file is replaced, never rewritten, while somebody else can see it:

    live ── freeze ──► frozen ── prepare_write ──► old; the window's live file is a reserved spare
                          └── nobody holds it any more, and it was never linked ──► live
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optstream.errors import ClosedError, OutOfSpaceError, WindowWriteError
from optstream.store.base import FrozenFile, Store, WindowFile
from optstream.store.checks import check_limits, check_space, distinct, reserve_refused
from optstream.store.files import Drive
from optstream.store.live import LiveFile
from optstream.units import PAGE_BYTES

log = logging.getLogger("optstream")


@dataclass
class Held:
    """Every file that a store holds.

    Attributes:
        live: of each window.
        spares: reserved for the next write of frozen windows.
        old: frozen ones that were replaced and are still to be read.
    """

    live: list[LiveFile] = field(default_factory=list)
    spares: dict[int, LiveFile] = field(default_factory=dict)
    old: dict[int, LiveFile] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LiveFile]:
        return iter((*self.live, *self.spares.values(), *self.old.values()))

    def clear(self) -> None:
        self.live.clear()
        self.spares.clear()
        self.old.clear()


class OnDrive(Store):
    """One file a window, striped round-robin over the directories.

    Closing, collecting and a normal exit remove the files. A forked child (a data loader's worker)
    closes its copies at once, so that it holds neither space nor locks when the parent ends; it
    cannot use the store. Close only when no transfer is under way.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        """Name the directories; nothing is touched before `reserve`.

        Raises:
            ConfigError: no directory, one that is no path, or one given twice.
        """
        self._drives = [Drive(path, cached=self.cached) for path in distinct(directories)]
        self._held = Held()
        self._specs: list[WindowFile] = []
        self._process = os.getpid()
        self._release = weakref.finalize(self, _release, self._held, self._drives)
        _open_stores.add(self)

    def reserve(self, files: Sequence[WindowFile]) -> None:
        self._check_usable()
        first = len(self._held.live)
        placed = [(self._drives[self.drive(first + i)], file) for i, file in enumerate(files)]
        try:
            for drive in self._drives:
                drive.prepare()
            check_limits(len(files), max((file.file_bytes for file in files), default=0))
            check_space([(drive.directory, file.file_bytes) for drive, file in placed])
            self._create(placed)
        except BaseException:
            self._remove_from(first)
            if first == 0:
                for drive in self._drives:
                    drive.close()
            raise
        self._specs += files

    def freeze(self, windows: Iterable[int], *, room: bool = True) -> dict[int, FrozenFile]:
        self._check_usable()
        windows = list(windows)
        missing = [w for w in windows if room and w not in self._held.spares]
        check_limits(len(windows) + len(missing), 0)
        try:
            self._reserve_spares(missing)
        except OutOfSpaceError:
            raise
        except OSError as error:
            log.warning("no files for the writes that follow: %s", error)
        return {
            window: self._held.live[window].freeze(self._specs[window].data_bytes)
            for window in windows
        }

    def device(self, window: int) -> int | None:
        self._check_usable()
        return os.fstat(self._held.live[window].fd).st_dev

    def file(self, window: int) -> WindowFile:
        return self._specs[window]

    def _make_writable(self, window: int) -> LiveFile | None:
        """Forget a window's digests; if it is frozen, give it its fresh file and return the old.

        Raises:
            WindowWriteError: there is none, and the drive refuses one.
        """
        live = self._held.live[window]
        frozen = self._replace(live, window) if live.frozen else None
        live = self._held.live[window]
        live.digests = {-live.header_bytes: live.digests[-live.header_bytes]}
        return frozen

    def _replace(self, frozen: LiveFile, window: int) -> LiveFile:
        try:
            if window not in self._held.spares:
                self._reserve_spares([window])
        except OSError as error:
            number, size = error.errno or errno.EIO, self._specs[window].data_bytes
            raise WindowWriteError(frozen.name, 0, size, number, str(error)) from error
        self._held.spares[window].write_header(self._specs[window].header)
        self._held.live[window] = self._held.spares.pop(window)
        return frozen

    def adopt(self, files: Mapping[int, FrozenFile]) -> bool:
        self._check_usable()
        adopted: dict[int, LiveFile] = {}
        for window, frozen in files.items():
            live = self._drives[self.drive(window)].adopt(frozen, self._specs[window])
            if live is None:
                for other in adopted.values():
                    other.abandon()
                return False
            adopted[window] = live
        for window, live in adopted.items():
            own, self._held.live[window] = self._held.live[window], live
            if own.frozen or window in self._held.spares:
                own.remove()
            else:
                self._held.spares[window] = own
        return True

    @property
    def folder(self) -> Path:
        return self._drives[0].directory

    @property
    def num_drives(self) -> int:
        return len(self._drives)

    def drive(self, window: int) -> int:
        return window % len(self._drives)

    def close(self) -> None:
        self._release()

    def _create(self, placed: Sequence[tuple[Drive, WindowFile]]) -> None:
        first = len(self._held.live)
        for window, (drive, file) in enumerate(placed, first):
            try:
                self._held.live.append(drive.create(window, file))
            except OSError as error:
                self._remove_from(first)  # the error shall tell what is free without them
                needed_bytes = sum(other.file_bytes for at, other in placed if at is drive)
                raise reserve_refused(drive.directory, needed_bytes, error) from error

    def _reserve_spares(self, windows: Sequence[int]) -> None:
        placed = [
            (self._drives[self.drive(window)], window, self._specs[window]) for window in windows
        ]
        for drive in {drive for drive, _, _ in placed}:
            drive.prepare()  # somebody may have removed the directory: nothing in it has a name
        needs = [(drive.directory, file.file_bytes) for drive, _, file in placed]
        check_space(needs, "a second generation of the state")
        made: dict[int, LiveFile] = {}
        try:
            for drive, window, file in placed:
                made[window] = drive.create(window, file, spare=True)
        except BaseException as error:
            for spare in made.values():
                spare.remove()
            if not isinstance(error, OSError):
                raise
            needed_bytes = sum(other.file_bytes for at, _, other in placed if at is drive)
            raise reserve_refused(drive.directory, needed_bytes, error) from error
        self._held.spares |= made

    def _remove_from(self, first: int) -> None:
        for file in self._held.live[first:]:
            file.remove()
        del self._held.live[first:]

    def _file(self, window: int, offset: int, buffer: memoryview) -> LiveFile:
        self._check_usable()
        assert 0 <= window < len(self._specs), window
        assert 0 <= offset <= self._specs[window].data_bytes - len(buffer), (window, offset)
        assert offset % PAGE_BYTES == len(buffer) % PAGE_BYTES == 0, (offset, len(buffer))
        return self._held.live[window]

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(
                "the state belongs to the parent process; a forked child cannot use it"
            )
        if not self._release.alive:
            raise ClosedError("the store was closed and its files are gone")

    def _abandon(self) -> None:
        for file in self._held:
            file.abandon()
        for drive in self._drives:
            drive.abandon()


def _release(held: Held, drives: list[Drive]) -> None:
    for file in held:
        file.remove()
    held.clear()
    for drive in drives:
        drive.close()


def _abandon_in_child() -> None:
    for store in list(_open_stores):
        store._abandon()


_open_stores: weakref.WeakSet[OnDrive] = weakref.WeakSet()
os.register_at_fork(after_in_child=_abandon_in_child)
