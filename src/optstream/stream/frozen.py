"""The frozen form of all windows, also of those that the drive refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from optstream.memory import read_available_bytes
from optstream.store.base import FrozenFile, Store, WindowFile, freeze_copy

Written = Future[FrozenFile | None]
"""The end of a write under way: None, or a copy in memory of what the drive refused."""


class Frozen:
    """The files of all windows that have state; the newest bytes of some may still be coming."""

    def __init__(self, files: dict[int, FrozenFile], under_way: Mapping[int, Written]) -> None:
        self._files = files
        self._under_way = under_way

    def settled(self) -> dict[int, FrozenFile]:
        """Return the files once all bytes are in them; any thread may call it.

        Raises:
            WindowWriteError: the drive refused one, and memory cannot hold a copy of it.
        """
        for window, written in self._under_way.items():
            copy = written.result()
            if copy is not None:
                self._files[window] = copy
        return self._files


def freeze(
    store: Store,
    stored: Collection[int],
    refused: Mapping[int, Exception],
    data: Callable[[int], memoryview],
    *,
    room: bool,
) -> dict[int, FrozenFile]:
    """Freeze what the store holds, and copy in memory what could not be written to it.

    Args:
        stored: windows that have state.
        refused: those whose newest bytes could not be written, and why.
        data: returns the bytes of such a window.
        room: see `Store.freeze`.

    Raises:
        OutOfSpaceError: no space for the next writes; nothing was frozen.
        WindowWriteError: memory cannot hold the copies; nothing was frozen.
    """
    copied_bytes = sum(store.file(window).file_bytes for window in refused)
    if copied_bytes > read_available_bytes():
        raise next(iter(refused.values()))
    frozen = store.freeze(sorted(window for window in stored if window not in refused), room=room)
    for window in refused:
        frozen[window] = _copy(store.file(window), window, data(window))
    return frozen


def end(
    written: Written, file: WindowFile, window: int, data: memoryview, error: Exception | None
) -> None:
    """Tell who froze a window while it was being written how that ended.

    Args:
        data: the bytes that were to be written, which nobody changes meanwhile.
        error: why the drive refused them.
    """
    if error is None:
        written.set_result(None)
        return
    try:
        if file.file_bytes > read_available_bytes():
            raise error
        written.set_result(_copy(file, window, data))
    except Exception as failure:
        written.set_exception(failure)


def _copy(file: WindowFile, window: int, data: memoryview) -> FrozenFile:
    return freeze_copy(file, data, f"window {window} in memory")
