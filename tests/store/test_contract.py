"""What every store promises, whatever holds its windows."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from optstream.errors import ClosedError, DigestError, OutOfSpaceError
from optstream.memory import read_memory
from optstream.store import WindowFile, open_store
from optstream.store.base import PIECE_BYTES, FrozenFile, Store

Make = Callable[[], Store]
Pages = Callable[..., memoryview]
Windows = Callable[..., list[WindowFile]]


KINDS = (
    "direct",
    "direct-striped",
    "direct-buffered",
    "direct-named",
    "direct-named-buffered",
    "mapped",
    "mapped-striped",
    "mapped-named",
    "memory",
)


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, drive_path: Path, refuse: Callable[[int, int], None]
) -> Make:
    if "buffered" in request.param:
        refuse(os.O_DIRECT, errno.EINVAL)
    if "named" in request.param:
        refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    kind = request.param.split("-")[0]
    names = ["a", "b", "c"] if "striped" in request.param else ["a"]
    return lambda: open_store(kind, [drive_path / name for name in names])


@pytest.fixture
def store(make: Make) -> Iterator[Store]:
    store = make()
    yield store
    store.close()


def update(store: Store, window: int, data: memoryview) -> None:
    """Give a window new bytes as the stream does."""
    store.prepare_write(window)
    if store.in_place or store.cached:
        store.bring_in(window)
        store.view(window)[:] = data
        store.write_back(window)
    else:
        for offset in range(0, len(data), PIECE_BYTES):
            store.write(window, offset, data[offset : offset + PIECE_BYTES])


def content(store: Store, window: int, buffer: memoryview) -> bytes:
    store.read(window, 0, buffer)
    return bytes(buffer)


def frozen_bytes(frozen: FrozenFile) -> bytes:
    with open(f"/proc/self/fd/{frozen.fd}", "rb") as file:
        return file.read()


def opened_at(path: Path, frozen: FrozenFile) -> FrozenFile:
    """Return a linked file as a load opens it."""
    fd = os.open(path, os.O_RDONLY)
    return FrozenFile(fd, str(path), frozen.header_bytes, frozen.data_bytes, frozen.digests)


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
        if not store.in_place and not store.cached:
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
            if store.in_place or store.cached:
                store.view(window)[:] = bytes(4096 * 4096)
            if not store.in_place:
                assert open_files(drive_path)
        if end == "close":
            store.close()
        del store
        gc.collect()
        assert [path for path in drive_path.rglob("*") if not path.is_dir()] == []
        assert not list(drive_path.glob("*/*"))
        assert open_files(drive_path) == []
        assert str(drive_path) not in Path("/proc/self/maps").read_text()
        assert read_memory().anon_bytes - anon_bytes < 16 * 2**20

    def test_updates_are_read(self, store: Store, pages: Pages, windows: Windows) -> None:
        store.reserve(windows(5, 1))
        for turn in range(3):
            for window, num_pages in enumerate((5, 1)):
                update(store, window, pages(num_pages, fill=turn + 10 * window))
        assert content(store, 0, pages(5, fill=99)) == pages(5, fill=2)
        assert content(store, 1, pages(1, fill=99)) == pages(1, fill=12)

    def test_frozen_bytes_survive_all_that_follows(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        header = windows(1)[0].header
        store.reserve(windows(5, 1, 2))
        for window, num_pages in enumerate((5, 1, 2)):
            update(store, window, pages(num_pages, fill=1 + window))
        first = store.freeze([0, 1])
        update(store, 0, pages(5, fill=11))
        second = store.freeze([0, 1, 2])
        for window, num_pages in enumerate((5, 1, 2)):
            update(store, window, pages(num_pages, fill=21 + window))
        third = store.freeze([0])
        store.close()
        assert frozen_bytes(first[0]) == header + pages(5, fill=1)
        assert frozen_bytes(first[1]) == frozen_bytes(second[1]) == header + pages(1, fill=2)
        assert frozen_bytes(second[0]) == header + pages(5, fill=11)
        assert frozen_bytes(second[2]) == header + pages(2, fill=3)
        assert frozen_bytes(third[0]) == header + pages(5, fill=21)

    @pytest.mark.parametrize("first_gone", [0, 1])
    def test_a_snapshot_outlives_another_of_the_same_window(
        self, first_gone: int, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(5))
        update(store, 0, pages(5, fill=1))
        held = [store.freeze([0]), store.freeze([0])]
        del held[first_gone]
        for fill in (2, 3):
            update(store, 0, pages(5, fill=fill))
        assert frozen_bytes(held[0][0])[4096:] == pages(5, fill=1)
        assert content(store, 0, pages(5)) == pages(5, fill=3)

    def test_what_was_once_linked_is_never_written_again(
        self, make: Make, store: Store, pages: Pages, windows: Windows, drive_path: Path
    ) -> None:
        store.reserve(windows(5))
        update(store, 0, pages(5, fill=1))
        if store.device(0) is None:
            pytest.skip("memory is not linked")
        frozen = store.freeze([0])
        frozen[0].link(drive_path / "w")
        other = make()
        other.reserve(windows(5))
        assert other.adopt({0: opened_at(drive_path / "w", frozen[0])})
        (drive_path / "w").unlink()
        del frozen
        update(store, 0, pages(5, fill=2))
        assert content(other, 0, pages(5)) == pages(5, fill=1)
        other.close()

    def test_freezing_writes_nothing(
        self, store: Store, pages: Pages, windows: Windows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.reserve(windows(5))
        update(store, 0, pages(5, fill=1))
        for fill in (2, 3):
            with monkeypatch.context() as watched:
                watched.setattr(os, "pwritev", lambda *_: pytest.fail("something was written"))
                frozen = store.freeze([0])
            update(store, 0, pages(5, fill=fill))
            assert frozen_bytes(frozen[0]) == windows(1)[0].header + pages(5, fill=fill - 1)

    def test_a_frozen_window_is_read_and_updated_in_part(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        store.reserve(windows(5))
        update(store, 0, pages(5, fill=1))
        frozen = store.freeze([0])
        assert content(store, 0, pages(5)) == pages(5, fill=1)
        if store.in_place or store.cached:  # what the update leaves alone is what was there
            store.prepare_write(0)
            assert content(store, 0, pages(5)) == pages(5, fill=1)
            store.bring_in(0)
            store.view(0)[4096:8192] = pages(1, fill=50)
            expected = bytes(pages(1, fill=1)) + bytes(pages(1, fill=50)) + bytes(pages(3, fill=3))
            assert content(store, 0, pages(5)) == expected
        assert frozen_bytes(frozen[0])[4096:] == pages(5, fill=1)

    def test_a_frozen_window_is_written_as_a_whole(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        """As resident windows are by a save; pieces come from several threads."""
        num_pages = 3 * PIECE_BYTES // 4096 - 5
        store.reserve(windows(num_pages))
        update(store, 0, pages(num_pages, fill=1))
        frozen = store.freeze([0])
        store.prepare_write(0)
        wanted = pages(num_pages, fill=7)
        with ThreadPoolExecutor(3) as pool:
            for at in range(0, len(wanted), PIECE_BYTES):
                pool.submit(store.write, 0, at, wanted[at : at + PIECE_BYTES])
        assert content(store, 0, pages(num_pages)) == wanted
        if not store.in_place:
            digests = store.freeze([0])[0].ordered_digests()
            assert digests[1] == xxhash.xxh3_64_intdigest(wanted[:PIECE_BYTES])
        assert frozen_bytes(frozen[0])[4096:] == pages(num_pages, fill=1)

    def test_digests_are_of_what_was_written(
        self, store: Store, pages: Pages, windows: Windows
    ) -> None:
        num_pages = 2 * PIECE_BYTES // 4096 + 3
        spec = windows(num_pages)[0]
        store.reserve([spec])
        for fill in (1, 2):
            data = pages(num_pages, fill=fill)
            update(store, 0, data)
            pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
            expected = tuple(xxhash.xxh3_64_intdigest(part) for part in (spec.header, *pieces))
            assert store.freeze([0])[0].ordered_digests() == expected

    def test_no_space_for_a_second_generation(
        self,
        store: Store,
        pages: Pages,
        windows: Windows,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        store.reserve(windows(4, 4))
        update(store, 0, pages(4, fill=1))
        with monkeypatch.context() as full:
            refusal = OutOfSpaceError(errno.ENOSPC, "full")

            def refuse(*args: object) -> None:
                raise refusal

            full.setattr("optstream.store.on_drive.check_space", refuse)
            full.setattr("optstream.store.memory.read_available_bytes", lambda: 0)
            with pytest.raises(OutOfSpaceError):
                store.freeze([0, 1])
        update(store, 0, pages(4, fill=2))
        frozen = store.freeze([0])
        update(store, 0, pages(4, fill=3))
        assert frozen_bytes(frozen[0])[4096:] == pages(4, fill=2)

    def test_files_of_a_checkpoint_are_taken_over(
        self, make: Make, store: Store, pages: Pages, windows: Windows, drive_path: Path
    ) -> None:
        store.reserve(windows(5, 1))
        for window, num_pages in enumerate((5, 1)):
            update(store, window, pages(num_pages, fill=1 + window))
        frozen = store.freeze([0, 1])
        other = make()
        other.reserve(windows(5, 1))
        update(other, 0, pages(5, fill=70))
        if store.device(0) is None:
            assert not other.adopt(frozen)
            assert content(other, 0, pages(5)) == pages(5, fill=70)
            other.close()
            return
        for window in (0, 1):
            frozen[window].link(drive_path / f"w{window}")
        files = {w: opened_at(drive_path / f"w{w}", frozen[w]) for w in (0, 1)}
        store.close()
        assert not other.adopt({**files, 0: files[1]})  # of another size
        assert content(other, 0, pages(5)) == pages(5, fill=70)
        assert other.adopt(files)
        assert content(other, 0, pages(5)) == pages(5, fill=1)
        assert content(other, 1, pages(1)) == pages(1, fill=2)
        update(other, 0, pages(5, fill=80))
        assert content(other, 0, pages(5)) == pages(5, fill=80)
        assert content(other, 1, pages(1)) == pages(1, fill=2)
        other.close()
        assert (drive_path / "w0").read_bytes()[4096:] == pages(5, fill=1)

    def test_a_damaged_file_is_noticed_where_it_is_needed(
        self, make: Make, store: Store, pages: Pages, windows: Windows, drive_path: Path
    ) -> None:
        store.reserve(windows(5))
        update(store, 0, pages(5, fill=1))
        if store.device(0) is None:
            pytest.skip("memory takes over no files")
        frozen = store.freeze([0])[0]
        path = drive_path / "damaged"
        frozen.link(path)
        store.close()
        other = make()
        other.reserve(windows(5))
        assert other.adopt({0: opened_at(path, frozen)})
        with path.open("r+b") as file:
            file.seek(4096 + 2 * 4096)
            file.write(b"x")
        with pytest.raises(DigestError):
            content(other, 0, pages(5))
        if other.cached:
            other.prepare_write(0)
            for _ in range(2):
                with pytest.raises(DigestError):
                    other.bring_in(0)
        other.close()
