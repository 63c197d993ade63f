"""The frozen form of all windows, also of those that the drive refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from optstream.memory import read_available_bytes
from optstream.store.base import FrozenFile, Store, freeze_copy


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
        name = f"window {window} in memory"
        frozen[window] = freeze_copy(store.file(window), data(window), name)
    return frozen
