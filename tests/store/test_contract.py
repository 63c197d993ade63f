"""What every store promises, whatever holds its windows."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optstream.errors import ClosedError, OutOfSpaceError
from optstream.memory import read_memory
from optstream.store import WindowFile, open_store
from optstream.store.base import Store

Make = Callable[[], Store]
Pages = Callable[..., memoryview]
Windows = Callable[..., list[WindowFile]]


@pytest.fixture(params=["direct", "striped", "buffered", "named", "named-buffered", "memory"])
def make(
    request: pytest.FixtureRequest, drive_path: Path, refuse: Callable[[int, int], None]
) -> Make:
    if "buffered" in request.param:
        refuse(os.O_DIRECT, errno.EINVAL)
    if "named" in request.param:
        refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    kind = "memory" if request.param == "memory" else "direct"
    names = ["a", "b", "c"] if request.param == "striped" else ["a"]
    return lambda: open_store(kind, [drive_path / name for name in names])


@pytest.fixture
def store(make: Make) -> Iterator[Store]:
    store = make()
    yield store
    store.close()


class TestStore:
    def test_fresh_windows_read_as_zeros(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(3, 1))
        for window, num_pages in enumerate((3, 1)):
            buffer = pages(num_pages, fill=7)
            store.read(window, 0, buffer)
            assert not any(buffer)

    def test_what_is_written_is_read(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(5, 1, 4, 2))
        sizes = (5, 1, 4, 2)
        for window, num_pages in enumerate(sizes):
            store.write(window, 0, pages(num_pages, fill=10 * window))
        for window, num_pages in enumerate(sizes):
            buffer = pages(num_pages, fill=99)
            store.read(window, 0, buffer)
            assert buffer == pages(num_pages, fill=10 * window)

    def test_part_of_a_window(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(6))
        store.write(0, 0, pages(6))
        store.write(0, 2 * 4096, pages(3, fill=50))
        whole, part = pages(6, fill=99), pages(2, fill=99)
        store.read(0, 0, whole)
        assert whole == bytes(pages(2)) + bytes(pages(3, fill=50)) + bytes(pages(1, fill=5))
        store.read(0, 4 * 4096, part)
        assert part == bytes(pages(1, fill=52)) + bytes(pages(1, fill=5))

    def test_threads_on_different_ranges(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(16, 16, 16))

        def round_trip(piece: int) -> bool:
            window, page = piece % 3, piece // 3 * 2
            for turn in range(5):
                wanted, found = pages(2, fill=piece + turn), pages(2, fill=99)
                store.write(window, page * 4096, wanted)
                store.read(window, page * 4096, found)
                if wanted != found:
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(round_trip, range(24)))

    def test_windows_reserved_later(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(1))
        store.write(0, 0, pages(1, fill=1))
        store.reserve([])
        store.reserve(windows(2, 3))
        store.write(2, 0, pages(3, fill=3))
        for window, num_pages, fill in ((0, 1, 1), (2, 3, 3)):
            buffer = pages(num_pages, fill=99)
            store.read(window, 0, buffer)
            assert buffer == pages(num_pages, fill=fill)

    def test_an_empty_window(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(0, 1))
        store.write(0, 0, pages(1)[:0])
        store.read(0, 0, pages(1)[:0])
        store.write(1, 0, pages(1, fill=4))

    def test_too_much_is_refused_and_changes_nothing(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(1))
        store.write(0, 0, pages(1, fill=8))
        with pytest.raises(OutOfSpaceError, match=r"needs 1\.0 PiB|needs 1024\.0 TiB"):
            store.reserve(windows(1, 2**38 - 2))
        store.reserve(windows(2))
        store.write(1, 0, pages(2))
        buffer = pages(1)
        store.read(0, 0, buffer)
        assert buffer == pages(1, fill=8)

    def test_each_window_is_on_one_drive(self, store: Store, windows: Windows) -> None:
        store.reserve(windows(1, 1, 1, 1))
        drives = [store.drive(window) for window in range(4)]
        assert set(drives) == set(range(store.num_drives))

    def test_view_is_the_window_itself(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(2))
        if not store.in_place:
            with pytest.raises(AssertionError):
                store.view(0)
            return
        store.write(0, 0, pages(2, fill=3))
        view = store.view(0)
        assert view == pages(2, fill=3)
        view[4096] = 77
        buffer = pages(2)
        store.read(0, 0, buffer)
        assert buffer[4096] == 77

    def test_closed_twice_and_then_unusable(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(1))
        store.close()
        store.close()
        for use in (
            lambda: store.read(0, 0, pages(1)),
            lambda: store.write(0, 0, pages(1)),
            lambda: store.reserve(windows(1)),
        ):
            with pytest.raises(ClosedError):
                use()

    @pytest.mark.parametrize("end", ["close", "collect", "too much"])
    def test_nothing_is_left(
        self,
        make: Make,
        end: str,
        pages: Pages,
        windows: Windows,
        drive_path: Path,
        open_files: Callable[[Path], list[str]],
    ) -> None:
        anon_bytes = read_memory().anon_bytes
        store = make()
        if end == "too much":
            with pytest.raises(OutOfSpaceError):
                store.reserve(windows(1, 2**38))
            assert list(drive_path.iterdir()) == []
            return
        store.reserve(windows(4096, 4096))
        for window in range(2):
            store.write(window, 0, pages(16))
            if store.in_place:
                store.view(window)[:] = bytes(4096 * 4096)
            else:
                assert open_files(drive_path)
        if end == "close":
            store.close()
        del store
        gc.collect()
        assert [path for path in drive_path.rglob("*") if not path.is_dir()] == []
        assert not list(drive_path.glob("*/*"))
        assert open_files(drive_path) == []
        assert read_memory().anon_bytes - anon_bytes < 16 * 2**20
