"""Windows in files on drives, moved by direct I/O: no page cache is kept. The default store."""

from __future__ import annotations

from optstream.store.on_drive import OnDrive


class Direct(OnDrive):
    """Every transfer goes between the drive and the caller's buffer."""

    def read(self, window: int, offset: int, buffer: memoryview) -> None:
        self._file(window, offset, buffer).read(offset, buffer)

    def write(self, window: int, offset: int, buffer: memoryview) -> None:
        self._file(window, offset, buffer).write(offset, buffer)

    def prepare_write(self, window: int) -> None:
        frozen = self._make_writable(window)
        if frozen is not None:
            frozen.remove()
