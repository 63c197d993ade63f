"""Windows in the page cache: shared mappings of files, which the kernel may write and reclaim.

The state is updated where it is mapped, so what fits in memory costs no copy and no transfer; what
does not is brought in ahead of the update and written back behind it. A page that cannot be read
ends the process where it is touched, so all are brought in by calls that return errors.

    frozen ── prepare_write ──► a fresh mapping, `old` file kept ── bring_in ──► copied, in memory
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from errno import EIO

import xxhash

from optstream.errors import WindowReadError, WindowWriteError
from optstream.store import pages
from optstream.store.base import PIECE_BYTES, FrozenFile
from optstream.store.live import LiveFile, check_digest
from optstream.store.on_drive import OnDrive
from optstream.store.transfer import read_whole
from optstream.units import PAGE_BYTES

_ADVICE_BYTES = 2**19
"""Of one read-ahead: the kernel cuts what it is asked for to the drive's limits."""


class Mapped(OnDrive):
    """One shared mapping a window; it stays while anybody holds a view, also after `close`."""

    cached = True

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        self._written: set[int] = set()
        super().__init__(directories)

    def read(self, window: int, offset: int, buffer: memoryview) -> None:
        self._file(window, offset, buffer)
        live = self._held.old.get(window, self._held.live[window])
        position = live.header_bytes + offset
        read_whole(live.fd, buffer, position, live.name)
        if live.adopted:
            check_digest(buffer, live.digests.get(offset), live.name, position)

    def write(self, window: int, offset: int, buffer: memoryview) -> None:
        live = self._file(window, offset, buffer)
        old = self._held.old.pop(window, None)
        if old is not None:  # all of it is written: nothing needs to be copied
            old.remove()
        live.write(offset, buffer)
        self._written.add(window)
        _sync(live, offset, len(buffer))

    def view(self, window: int) -> memoryview:
        self._check_usable()
        live = self._held.live[window]
        assert not live.frozen, f"prepare_write({window}) comes first"
        return _view(live)

    def prepare_write(self, window: int) -> None:
        self._check_usable()
        self._copy_old(window)
        frozen = self._make_writable(window)
        if frozen is not None:
            self._held.old[window] = frozen

    def bring_in(self, window: int) -> int:
        self._check_usable()
        if window in self._held.old:
            return self._copy_old(window)
        live = self._held.live[window]
        view = _view(live)
        missing_bytes = _read_ahead(live, len(view))
        # pages that were not written back since are writable already
        if missing_bytes or window in self._written:
            _populate(live)
            self._written.discard(window)
        return missing_bytes

    def write_back(self, window: int) -> int:
        self._check_usable()
        live = self._held.live[window]
        if live.frozen:
            return 0
        self._copy_old(window)
        view = _view(live)
        self._take_digests(window)
        self._written.add(window)
        _sync(live, 0, len(view))
        return len(view)

    def freeze(self, windows: Iterable[int], *, room: bool = True) -> dict[int, FrozenFile]:
        self._check_usable()
        windows = list(windows)
        for window in windows:
            self._copy_old(window)
            self._take_digests(window)
        return super().freeze(windows, room=room)

    def adopt(self, files: Mapping[int, FrozenFile]) -> bool:
        if not super().adopt(files):
            return False
        for window in files:
            old = self._held.old.pop(window, None)
            if old is not None:
                old.remove()
        return True

    def _take_digests(self, window: int) -> None:
        """Compute the digests of what was changed since they were last taken."""
        live = self._held.live[window]
        if live.frozen:
            return
        view = _view(live)
        for offset in range(0, len(view), PIECE_BYTES):
            if offset not in live.digests:
                piece = view[offset : offset + PIECE_BYTES]
                live.digests[offset] = xxhash.xxh3_64_intdigest(piece)

    def _copy_old(self, window: int) -> int:
        """Copy the frozen file into the fresh one, if that is still to be done.

        Returns:
            Bytes that had to be read from the drive.
        """
        old = self._held.old.get(window)
        if old is None:
            return 0
        view = _view(self._held.live[window])
        missing_bytes = _read_ahead(old, len(view))
        for offset in range(0, len(view), PIECE_BYTES):
            old.read(offset, view[offset : offset + PIECE_BYTES])
        del self._held.old[window]
        old.remove()
        return missing_bytes


def _view(live: LiveFile) -> memoryview:
    assert live.view is not None, live.name
    return live.view


def _read_ahead(live: LiveFile, num_bytes: int) -> int:
    """Start reading a file's data into the page cache; return the bytes that were not there."""
    end = live.header_bytes + num_bytes
    missing_bytes = pages.count_missing_bytes(live.fd, end)
    for position in range(0, end if missing_bytes else 0, _ADVICE_BYTES):
        os.posix_fadvise(live.fd, position, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
    return missing_bytes


def _populate(live: LiveFile) -> None:
    view = _view(live)
    try:
        if len(view):
            pages.populate(view, writable=True)
    except OSError as error:
        _check_readable(live, len(view))
        number = error.errno or EIO
        raise WindowReadError(live.name, live.header_bytes, len(view), number) from error


def _sync(live: LiveFile, offset: int, num_bytes: int) -> None:
    if num_bytes == 0:
        return
    part = _view(live)[offset : offset + num_bytes]
    try:
        pages.sync_mapping(part)
    except OSError as error:
        # the kernel takes the pages for written; dirty ones stay in memory and are tried again
        part[::PAGE_BYTES] = bytes(part[::PAGE_BYTES])
        position, number = live.header_bytes + offset, error.errno or EIO
        raise WindowWriteError(live.name, position, num_bytes, number) from error


def _check_readable(live: LiveFile, num_bytes: int) -> None:
    """Raise WindowReadError with the place and the cause, if it is the drive that fails."""
    piece = memoryview(bytearray(PIECE_BYTES))
    for position in range(live.header_bytes, live.header_bytes + num_bytes, PIECE_BYTES):
        rest = min(PIECE_BYTES, live.header_bytes + num_bytes - position)
        read_whole(live.fd, piece[:rest], position, live.name)
