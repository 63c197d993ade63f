"""What overlaps, what is read and written, and by whom; all by order of events, never by time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import optstream
from faults.drive import open_files
from optstream.errors import WindowWriteError
from optstream.optimizer import StreamedOptimizer
from stream.fake import WAIT_S, FakeStore, Watched, one_param_a_window

NUM_WINDOWS = 12
NUM_SLOTS = 4
Install = Callable[[FakeStore], FakeStore]


@pytest.fixture
def store(install: Install) -> FakeStore:
    return install(FakeStore())


def wrap(
    optimizer: torch.optim.Optimizer, io_threads: int = 1, num_windows: int = NUM_WINDOWS
) -> StreamedOptimizer:
    """Wrap with one thread a drive: with more, transfers end in any order."""
    streamed = optstream.offload(
        optimizer, "/", window="64KiB", store="fake", io_threads=io_threads
    )
    assert streamed.plan.num_windows == num_windows
    return streamed


def step_and_settle(store: FakeStore, optimizer: StreamedOptimizer) -> tuple[list[int], list[int]]:
    """Return the windows that a step, with its last writes, read and wrote."""
    optimizer.step()
    report = optimizer.report
    assert report is not None
    store.wait_for(lambda: sum(what == "write" for what, _ in store.events) == report.num_windows)
    return store.take("read"), store.take("write")


def test_windows_to_come_are_read_while_one_is_updated(store: FakeStore) -> None:
    """Each update waits until the window three behind it was read, into the slot just written."""
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    ahead = NUM_SLOTS - 1
    with wrap(inner) as optimizer:
        step_and_settle(store, optimizer)
        for order in (range(NUM_WINDOWS)[::-1], range(NUM_WINDOWS)):
            inner.calls.clear()

            def during(number: int, order: range = order) -> None:
                if 1 <= number < NUM_WINDOWS - ahead:
                    coming = ("read", order[number + ahead])
                    store.wait_for(lambda: coming in store.events)

            inner.during = during
            step_and_settle(store, optimizer)


def test_a_window_is_written_while_the_next_is_updated(store: FakeStore) -> None:
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    with wrap(inner) as optimizer:
        for order in (range(NUM_WINDOWS), range(NUM_WINDOWS)[::-1]):
            inner.calls.clear()

            def during(number: int, order: range = order) -> None:
                if number > 0:
                    before = ("write", order[number - 1])
                    store.wait_for(lambda: before in store.events)

            inner.during = during
            step_and_settle(store, optimizer)


def test_the_scan_turns_and_what_is_in_slots_is_not_read_again(store: FakeStore) -> None:
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    forth = list(range(NUM_WINDOWS))
    with wrap(inner) as optimizer:
        read, written = step_and_settle(store, optimizer)
        assert (read, sorted(written)) == ([], forth)  # new state is zeros, which need no read
        for order in (forth[::-1], forth, forth[::-1], forth):
            read, written = step_and_settle(store, optimizer)
            assert sorted(read) == sorted(order[NUM_SLOTS:])
            assert sorted(written) == forth


def test_windows_that_fit_into_the_slots_are_never_read(install: Install) -> None:
    store = install(FakeStore())
    with wrap(Watched(one_param_a_window(NUM_SLOTS)), num_windows=NUM_SLOTS) as optimizer:
        for _ in range(4):
            read, written = step_and_settle(store, optimizer)
            assert (read, len(written)) == ([], NUM_SLOTS)


def test_the_last_writes_go_on_behind_the_step(store: FakeStore) -> None:
    """step() returns while the last windows cannot be written yet; the next step waits for them."""
    gate = threading.Event()
    held = set(range(NUM_WINDOWS - 2, NUM_WINDOWS))

    def before(verb: str, window: int) -> None:
        if verb == "write" and window in held:
            assert gate.wait(WAIT_S)

    store.before = before
    with wrap(Watched(one_param_a_window(NUM_WINDOWS))) as optimizer:
        optimizer.step()
        assert held.isdisjoint(store.take("write"))
        gate.set()
        store.wait_for(lambda: len([1 for what, _ in store.events if what == "write"]) >= 2)
        assert set(store.take("write")) >= held
        read, _ = step_and_settle(store, optimizer)
        assert held.isdisjoint(read)


def test_a_write_fails_while_the_next_step_waits_for_it(install: Install) -> None:
    """That step must not update the only copy there is; it writes it when it is called again."""
    store = install(FakeStore())
    gate = threading.Event()

    def before(verb: str, window: int) -> None:
        assert gate.wait(WAIT_S)
        raise WindowWriteError("fake", 0, 4096, errno.EIO)

    params, plain = one_param_a_window(1), one_param_a_window(1)
    reference = Watched(plain)
    with wrap(inner := Watched(params), num_windows=1) as optimizer:
        store.before = before
        optimizer.step()
        inner.calls.clear()
        threading.Timer(0.2, gate.set).start()
        with pytest.raises(WindowWriteError, match="has updated 0 windows"):
            optimizer.step()
        assert inner.calls == []
        store.before = lambda verb, window: None
        optimizer.step()
        optimizer.step()
    for _ in range(3):
        reference.step()
    assert torch.equal(params[0], plain[0])


def test_closing_waits_for_the_last_writes(store: FakeStore) -> None:
    optimizer = wrap(Watched(one_param_a_window(NUM_WINDOWS)))
    optimizer.step()
    optimizer.close()
    assert sorted(store.take("write")) == list(range(NUM_WINDOWS))


def test_windows_without_gradients_cause_no_traffic(store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params)) as optimizer:
        step_and_settle(store, optimizer)
        for missing in ({0, 1, 2, 3, 4}, {11}, {1, 3, 5, 7, 9}, set(range(12)), {6}):
            for index, param in enumerate(params):
                param.grad = None if index in missing else torch.ones_like(param)
            read, written = step_and_settle(store, optimizer)
            assert sorted(written) == sorted(set(range(NUM_WINDOWS)) - missing)
            assert missing.isdisjoint(read)
            assert optimizer.report is not None
            assert optimizer.report.num_windows == NUM_WINDOWS - len(missing)


def meet_at_writes(store: FakeStore, parties: int) -> None:
    """Let no write begin before so many do."""
    meeting = threading.Barrier(parties)

    def before(verb: str, window: int) -> None:
        if verb == "write":
            meeting.wait(WAIT_S)

    store.before = before


def test_drives_hold_windows_in_turn_and_work_at_the_same_time(install: Install) -> None:
    """One thread a drive: a transfer of each meets one of the other, or waits for ever."""
    store = install(FakeStore(num_drives=2))
    params = one_param_a_window(NUM_WINDOWS)
    meet_at_writes(store, 2)
    with wrap(Watched(params)) as optimizer:
        for _ in range(3):
            step_and_settle(store, optimizer)
    assert store.threads == {0: {"optstream-drive0_0"}, 1: {"optstream-drive1_0"}}


def test_threads_of_one_drive_work_at_the_same_time(install: Install) -> None:
    store = install(FakeStore())
    meet_at_writes(store, 3)
    with wrap(Watched(one_param_a_window(NUM_WINDOWS)), io_threads=3) as optimizer:
        step_and_settle(store, optimizer)
    assert len(store.threads[0]) == 3


def test_several_directories(tmp_path: Path) -> None:
    """Every directory has its share of the files."""
    directories = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    with optstream.offload(inner, directories, window="64KiB") as optimizer:
        optimizer.step()
        assert [len(open_files(directory)) for directory in directories] == [4, 4, 4]
    assert [open_files(directory) for directory in directories] == [[], [], []]
