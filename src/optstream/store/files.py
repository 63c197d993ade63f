"""Window files on a drive: nameless where the filesystem can, reserved in full before use.

What a filesystem cannot do is found at the first file and announced once:

    cannot               | instead
    ---------------------+---------------------------------------------------------
    nameless files       | named ones in a private directory (see claim.py)
    O_DIRECT             | buffered transfers, their page cache dropped at once
    fallocate            | zeros written over the whole file

Files of a store that keeps them in the page cache (`cached`) are mapped; they do no direct I/O.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from errno import EINVAL, EISDIR, ENOENT, ENOSYS, EOPNOTSUPP
from functools import cached_property
from pathlib import Path

from optstream.errors import WindowWriteError
from optstream.mounts import find_mount
from optstream.store import linux
from optstream.store.base import FrozenFile, WindowFile
from optstream.store.checks import make_directory, remove_directories
from optstream.store.claim import Claim, purge_stale
from optstream.store.live import LiveFile, aligned
from optstream.units import PAGE_BYTES

_NO_NAMELESS_FILES = {EOPNOTSUPP, EISDIR, ENOENT, EINVAL}
_NO_RESERVE = {EOPNOTSUPP, ENOSYS}
_ZEROS_BYTES = 8 * 2**20

log = logging.getLogger("optstream")


class Drive:
    """One directory that window files are made in."""

    def __init__(
        self,
        directory: Path,
        announce: Callable[[str], None] = log.warning,
        *,
        cached: bool = False,
    ) -> None:
        """Name the directory; nothing is touched.

        Args:
            announce: is told, once each, what the filesystem cannot do and what is done instead.
            cached: make files that are mapped, not ones for direct I/O.
        """
        self.directory = directory
        self._announce = announce
        self._cached = cached
        self._made: list[Path] = []
        self._claim: Claim | None = None
        self._direct = not cached
        self._num_named = 0
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """Make the directory if it is missing, check it, and remove what dead runs left in it.

        Raises:
            StoreError: see `make_directory`.
        """
        self._made += make_directory(self.directory)
        purge_stale(self.directory)

    def create(self, window: int, file: WindowFile, *, spare: bool = False) -> LiveFile:
        """Make a window's file, reserve all of it, write its header; the data reads as zeros.

        Args:
            spare: leave the header to the file's first use.

        Raises:
            OSError: the filesystem refuses; nothing is left of the file.
        """
        live = self._open(window, len(file.header))
        try:
            try:
                self._fill(live, file, spare)
            except WindowWriteError as error:
                if error.errno != EINVAL or not live.direct:
                    raise
                self._use_page_cache("the filesystem refuses O_DIRECT", live)
                self._fill(live, file, spare)
            if self._cached:
                live.map()
        except BaseException:
            live.remove()
            raise
        return live

    def close(self) -> None:
        """Let go of the directory, and remove it if it was made here; its files must be gone.

        With nameless files another run may be in one that looks empty: it makes it anew.
        """
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        remove_directories(self._made)
        self._made = []

    def abandon(self) -> None:
        """Forget everything in a forked child: it is the parent's."""
        if self._claim is not None:
            self._claim.abandon()
            self._claim = None

    def _open(self, window: int, header_bytes: int) -> LiveFile:
        while True:
            path = self._next_path()
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
            flags |= os.O_TMPFILE if path is None else os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                fd = os.open(path or self.directory, flags, 0o600)
            except OSError as error:
                if self._direct and error.errno == EINVAL:
                    if path is not None:
                        path.unlink(missing_ok=True)  # made before O_DIRECT was refused
                    self._use_page_cache("the filesystem refuses O_DIRECT")
                elif path is None and error.errno in _NO_NAMELESS_FILES:
                    self._use_names()
                else:
                    raise
                continue
            name = str(path or f"{self.directory} (nameless file of window {window})")
            live = LiveFile(fd, path, name, header_bytes, self._direct, cached=self._cached)
            self._check_alignment(live)
            if self._copies_on_write:
                linux.overwrite_in_place(fd)
            return live

    @cached_property
    def _copies_on_write(self) -> bool:
        mount = find_mount(self.directory)
        return mount is not None and mount.kind == "btrfs"

    def _check_alignment(self, live: LiveFile) -> None:
        align_bytes = linux.direct_align_bytes(live.fd) if live.direct else None
        if align_bytes == 0:
            self._use_page_cache("the filesystem does no direct I/O", live)
        elif align_bytes is not None and align_bytes > PAGE_BYTES:
            self._use_page_cache(f"direct I/O needs an alignment of {align_bytes} bytes", live)

    def adopt(self, frozen: FrozenFile, file: WindowFile) -> LiveFile | None:
        """Open a checkpoint's file anew, frozen, if it is just like `file`; None otherwise."""
        self._made += make_directory(self.directory)  # whoever made it may have removed it
        try:
            fd = os.open(f"/proc/self/fd/{frozen.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        found = os.fstat(fd)
        fits = found.st_size == file.file_bytes and found.st_dev == self.directory.stat().st_dev
        if not fits or os.pread(fd, len(file.header), 0) != file.header:
            os.close(fd)
            return None
        live = LiveFile(fd, None, frozen.name, len(file.header), direct=False)
        live.adopted, live.digests = True, dict(frozen.digests)
        if self._direct:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            live.direct = True
        return live

    def _next_path(self) -> Path | None:
        if self._claim is None:
            return None
        path = self._claim.file(self._num_named)
        self._num_named += 1
        return path

    def _fill(self, live: LiveFile, file: WindowFile, spare: bool) -> None:
        self._reserve(live, file.file_bytes)
        if not spare:
            live.write_header(file.header)

    def _reserve(self, live: LiveFile, num_bytes: int) -> None:
        try:
            linux.fallocate(live.fd, num_bytes)
        except OSError as error:
            if error.errno not in _NO_RESERVE:
                raise
            self._warn("its filesystem cannot reserve space; zeros are written instead")
            zeros = aligned(min(num_bytes, _ZEROS_BYTES))
            for position in range(0, num_bytes, _ZEROS_BYTES):
                live.write(position - live.header_bytes, zeros[: num_bytes - position])

    def _use_names(self) -> None:
        self._warn(
            "its filesystem has no nameless files; named ones are used, and what a killed run "
            "leaves is removed by the next start"
        )
        self._claim = Claim(self.directory)

    def _use_page_cache(self, cause: str, live: LiveFile | None = None) -> None:
        self._direct = False
        if live is not None:
            live.use_page_cache()
        self._warn(f"{cause}; buffered transfers are used, which are slower")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._announce(f"{self.directory}: {text}")
