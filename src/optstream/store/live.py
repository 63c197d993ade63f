"""The open file of a window: reading, writing, freezing it."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path

import xxhash

from optstream.errors import DigestError, StoreError, WindowWriteError
from optstream.store.base import FrozenFile, Sharing
from optstream.store.pages import map_shared
from optstream.store.transfer import read_whole, write_whole


@dataclass
class LiveFile:
    """The open file of one window.

    Attributes:
        path: None for a nameless file.
        name: the file in words, for errors.
        direct: transfers bypass the page cache; else they are flushed and dropped from it.
        cached: what is written stays in the page cache, to be flushed by others.
        view: the data, mapped shared, where `cached`; it may outlive the file.
        snapshot: the frozen form that was handed out, if somebody still holds it.
        sharing: whether others may hold the file.
        adopted: it came from a checkpoint; what is read is held against its digest.
        digests: xxh3 of what was written, by offset in the data; the header's at -header_bytes.
    """

    fd: int
    path: Path | None
    name: str
    header_bytes: int
    direct: bool
    snapshot: weakref.ref[FrozenFile] | None = None
    sharing: Sharing = field(default_factory=Sharing)
    adopted: bool = False
    digests: dict[int, int] = field(default_factory=dict)
    cached: bool = False
    view: memoryview | None = None

    def read(self, offset: int, buffer: memoryview) -> None:
        position = self.header_bytes + offset
        read_whole(self.fd, buffer, position, self.name)
        if self.adopted or self.sharing.linked:
            check_digest(buffer, self.digests.get(offset), self.name, position)
        if not self.direct:
            os.posix_fadvise(self.fd, position, len(buffer), os.POSIX_FADV_DONTNEED)

    def write_header(self, header: bytes) -> None:
        buffer = aligned(len(header))
        buffer[:] = header
        self.write(-len(header), buffer)

    def write(self, offset: int, buffer: memoryview) -> None:
        position = self.header_bytes + offset
        write_whole(self.fd, buffer, position, self.name)
        self.digests[offset] = xxhash.xxh3_64_intdigest(buffer)
        if not self.direct and not self.cached:
            self._drop_cache(position, len(buffer))

    def _drop_cache(self, position: int, num_bytes: int) -> None:
        try:
            os.fdatasync(self.fd)  # only clean pages can be dropped
        except OSError as error:
            number = error.errno or EIO
            raise WindowWriteError(self.name, position, num_bytes, number) from error
        os.posix_fadvise(self.fd, position, num_bytes, os.POSIX_FADV_DONTNEED)

    def freeze(self, data_bytes: int) -> FrozenFile:
        """Make it immutable while a snapshot shows it, and for ever once it is linked."""
        held = self.snapshot() if self.snapshot else None
        if held is not None:
            return held
        fd, size = os.dup(self.fd), self.header_bytes
        frozen = FrozenFile(fd, self.name, size, data_bytes, self.digests, self.sharing)
        self.snapshot = weakref.ref(frozen)
        return frozen

    @property
    def frozen(self) -> bool:
        """Tell whether somebody else may still see what it holds."""
        if self.adopted or self.sharing.linked:
            return True
        return self.snapshot is not None and self.snapshot() is not None

    def map(self) -> None:
        """Make `view`.

        Raises:
            StoreError: the filesystem or a limit does not allow it.
        """
        try:
            self.view = map_shared(self.fd, os.fstat(self.fd).st_size)[self.header_bytes :]
        except OSError as error:
            number = error.errno or EIO
            raise StoreError(
                number,
                f"{self.name} cannot be mapped: {os.strerror(number)}; raise the limits of this "
                'process (ulimit -v, vm.max_map_count), or use store="direct"',
            ) from error

    def use_page_cache(self) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def remove(self) -> None:
        """Close the file and give its space back."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close the file and leave it as it is: in a forked child it is the parent's."""
        self.path = None
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def check_digest(buffer: memoryview, digest: int | None, name: str, position: int) -> None:
    """Raise DigestError if these bytes of a file are not what was once written there."""
    if xxhash.xxh3_64_intdigest(buffer) != digest:
        raise DigestError(name, position, len(buffer))


def aligned(num_bytes: int) -> memoryview:
    """Return page-aligned zeros; a mapping of its own, freed with the last view."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
