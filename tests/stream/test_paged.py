"""The stream of windows in the page cache: order, threads, what is written back, what fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import optstream
from optstream.errors import WindowReadError, WindowWriteError
from optstream.optimizer import StreamedOptimizer
from optstream.store.memory import Memory
from stream.fake import Watched, one_param_a_window

NUM_WINDOWS = 6
WAIT_S = 20


class FakePages(Memory):
    """Pages in memory that remember what was done with them, and when.

    Attributes:
        events: (what, window), in order of their end.
        before: called at the start of each, on its thread; it may wait or raise.
    """

    in_place = False
    cached = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.before: Callable[[str, int], None] = lambda what, window: None
        self.changed = threading.Condition()

    def _did(self, what: str, window: int) -> int:
        self.before(what, window)
        with self.changed:
            self.events.append((what, window))
            self.changed.notify_all()
        return 65536

    def prepare_write(self, window: int) -> None:
        self._did("prepare", window)

    def bring_in(self, window: int) -> int:
        return self._did("bring", window)

    def write_back(self, window: int) -> int:
        return self._did("write", window)

    def take(self, what: str) -> list[int]:
        with self.changed:
            return [window for done, window in self.events if done == what]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "it never happened"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakePages:
    fake = FakePages()
    monkeypatch.setitem(optstream.store._KINDS, "fake", lambda directories: fake)
    return fake


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is less memory than state."""
    monkeypatch.setattr("optstream.stream.page_cache.read_available_bytes", lambda: 1000)


@pytest.fixture
def inner() -> Watched:
    return Watched(one_param_a_window(NUM_WINDOWS))


@pytest.fixture
def optimizer(store: FakePages, inner: Watched) -> Iterator[StreamedOptimizer]:
    with optstream.offload(inner, "/", window="64KiB", store="fake") as optimizer:
        assert optimizer.plan.num_windows == NUM_WINDOWS
        yield optimizer


def test_every_window_is_prepared_and_brought_in_once_a_scan(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    optimizer.step()
    store.wait_for(lambda: len(store.take("bring")) == NUM_WINDOWS + 2)
    assert sorted(store.take("prepare")[:NUM_WINDOWS]) == list(range(NUM_WINDOWS))
    assert sorted(store.take("bring")[NUM_WINDOWS:]) == [NUM_WINDOWS - 2, NUM_WINDOWS - 1]
    optimizer.step()  # backwards
    store.wait_for(lambda: len(store.take("bring")) == 2 * NUM_WINDOWS + 2)
    assert sorted(store.take("bring")[-2:]) == [0, 1]


def test_two_windows_are_brought_in_while_one_is_updated(
    store: FakePages, inner: Watched, optimizer: StreamedOptimizer
) -> None:
    seen = []

    def during(number: int) -> None:
        if number == 1:
            store.wait_for(lambda: len(store.take("bring")) == 4)
            seen.append(store.take("bring"))

    inner.during = during
    optimizer.step()
    assert sorted(seen[0]) == [0, 1, 2, 3]


def test_nothing_is_written_back_where_all_fits(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    for _ in range(3):
        optimizer.step()
    assert store.take("write") == []
    assert optimizer.report is not None
    assert optimizer.report.written_bytes == 0


@pytest.mark.usefixtures("short")
def test_windows_are_written_back_behind_the_update_where_not_all_fits(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    reports = []
    for _ in range(3):
        optimizer.step()
        reports.append(optimizer.report)
    store.wait_for(lambda: len(store.take("write")) == 3 * NUM_WINDOWS)
    optimizer.zero_grad()
    optimizer.step()  # without windows: what drained behind the last one is counted
    reports.append(optimizer.report)
    assert sum(report.written_bytes for report in reports) == 3 * NUM_WINDOWS * 65536
    assert sum(report.read_bytes for report in reports) == 2 * NUM_WINDOWS * 65536
    assert reports[0].read_bytes == 0  # they held nothing yet


def test_the_kernels_limit_on_dirty_pages_is_told_once(
    optimizer: StreamedOptimizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "optstream.stream.page_cache.read_dirty_limit_bytes"
    for limit_bytes in (NUM_WINDOWS * 65536, 65536, 65536):
        monkeypatch.setattr(name, lambda limit_bytes=limit_bytes: limit_bytes)
        optimizer.step()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("384.0 KiB of page cache change in each step")
    assert "has changed 64.0 KiB of it: raise vm.dirty_ratio" in warning


def test_a_snapshot_writes_back_what_was_updated_since(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    optimizer.step()
    optimizer.state_dict()
    assert sorted(store.take("write")) == list(range(NUM_WINDOWS))
    optimizer.state_dict()
    assert len(store.take("write")) == NUM_WINDOWS
    optimizer.step()
    assert optimizer.report is not None
    assert optimizer.report.written_bytes == NUM_WINDOWS * 65536
    optimizer.state_dict()
    assert len(store.take("write")) == 2 * NUM_WINDOWS


def test_what_was_prepared_before_a_snapshot_is_prepared_again(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    """Else the update would go to the frozen file."""
    optimizer.step()
    store.wait_for(lambda: len(store.take("bring")) == NUM_WINDOWS + 2)
    optimizer.state_dict()
    store.events.clear()
    optimizer.step()
    assert set(store.take("prepare")) == set(range(NUM_WINDOWS))


@pytest.mark.usefixtures("short")
def test_no_window_is_prepared_while_it_is_written_back(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    """Its digests would be of a window half updated."""
    writing: set[int] = set()
    clashes = []

    def before(what: str, window: int) -> None:
        if what == "write":
            writing.add(window)
            time.sleep(0.01)
            writing.discard(window)
        elif window in writing:
            clashes.append((what, window))

    store.before = before
    for _ in range(4):
        optimizer.step()
    assert clashes == []


def fail_on(what: str, window: int, error: Exception) -> Callable[[str, int], None]:
    def before(done: str, at: int) -> None:
        if (done, at) == (what, window):
            raise error

    return before


@pytest.mark.parametrize("what", ["prepare", "bring"])
def test_a_window_that_cannot_be_brought_in(
    what: str, store: FakePages, inner: Watched, optimizer: StreamedOptimizer
) -> None:
    optimizer.step()
    kind = WindowReadError if what == "bring" else WindowWriteError
    store.before = fail_on(what, 2, kind("file", 4096, 65536, 5))
    inner.calls.clear()
    with pytest.raises(kind, match=r"has updated 3 windows and left 3") as caught:
        optimizer.step()
    assert caught.value.window == 2
    store.before = lambda what, window: None
    optimizer.step()
    assert len(inner.calls) == NUM_WINDOWS
    assert optimizer.report is not None
    assert optimizer.report.step == 2


@pytest.mark.usefixtures("short")
def test_a_window_that_cannot_be_written_back(
    store: FakePages, inner: Watched, optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    error = WindowWriteError("file", 4096, 65536, 5)
    store.before = fail_on("write", 1, error)
    with contextlib.suppress(WindowWriteError):  # it may be known before the step ends
        optimizer.step()
    with pytest.raises(WindowWriteError):
        optimizer.step()
    params = [param.detach().clone() for param in inner.param_groups[0]["params"]]
    with pytest.raises(WindowWriteError):
        optimizer.step()  # nothing is updated on top of it
    assert all(map(torch.equal, params, inner.param_groups[0]["params"]))
    optimizer.save(tmp_path / "checkpoint")  # from memory
    optstream.verify(tmp_path / "checkpoint")
    store.before = lambda what, window: None
    optimizer.step()
    assert 1 in store.take("write")


def test_an_optimizer_that_raises(
    store: FakePages, inner: Watched, optimizer: StreamedOptimizer
) -> None:
    def during(number: int) -> None:
        if number == 2:
            raise ValueError("mine")

    inner.during = during
    with pytest.raises(ValueError, match="mine"):
        optimizer.step()
    optimizer.step()
    assert optimizer.report is not None
    assert optimizer.report.step == 1


def test_other_parameters_in_the_next_step(
    store: FakePages, inner: Watched, optimizer: StreamedOptimizer
) -> None:
    """What was brought in for nothing does not stand in the way."""
    optimizer.step()
    store.wait_for(lambda: len(store.take("bring")) == NUM_WINDOWS + 2)
    params = inner.param_groups[0]["params"]
    grads = [param.grad for param in params]
    for param in params[-2:]:
        param.grad = None
    store.events.clear()
    inner.calls.clear()
    inner.during = lambda number: store.wait_for(
        lambda: number != 0 or sorted(store.take("bring")[:3]) == [1, 2, 3]
    )
    optimizer.step()  # backwards: the last two were brought in for it
    inner.during = lambda number: None
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    assert optimizer.report is not None
    assert optimizer.report.num_windows == NUM_WINDOWS


def test_state_that_is_replaced_starts_from_zeros(
    store: FakePages, optimizer: StreamedOptimizer
) -> None:
    optimizer.step()
    stream = optimizer._state.stream
    stream.replace([1])
    devices = dict.fromkeys(range(2), torch.device("cpu"))
    with contextlib.closing(stream.windows([0, 1], devices)) as windows:
        assert [bool(data.any()) for _, data in windows] == [False, True]


def test_threads_end_with_the_optimizer(store: FakePages, inner: Watched) -> None:
    with optstream.offload(inner, "/", window="64KiB", store="fake", io_threads=3) as optimizer:
        optimizer.step()
        names = [thread.name for thread in threading.enumerate() if "optstream" in thread.name]
        assert 0 < len(names) <= 3
    assert not [thread for thread in threading.enumerate() if "optstream" in thread.name]
