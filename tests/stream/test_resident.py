"""Resident windows: no traffic between steps, one write a save, and the same bits."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import OutOfSpaceError, WindowReadError, WindowWriteError
from optstream.optimizer import StreamedOptimizer
from stream.fake import WAIT_S, FakeStore, Watched, one_param_a_window

NUM_WINDOWS = 12
NUM_SLOTS = 4
WINDOW_BYTES = 64 * 2**10
Install = Callable[[FakeStore], FakeStore]


@pytest.fixture
def store(install: Install) -> FakeStore:
    return install(FakeStore())


def wrap(optimizer: torch.optim.Optimizer, num_resident: int) -> StreamedOptimizer:
    ram = num_resident * WINDOW_BYTES
    streamed = optstream.offload(
        optimizer, "/", window="64KiB", store="fake", ram=ram, io_threads=1
    )
    assert streamed.plan.num_resident == min(num_resident, streamed.plan.num_windows)
    return streamed


def step_and_settle(optimizer: StreamedOptimizer, store: FakeStore) -> tuple[list[int], list[int]]:
    """Return the windows that a step, with its last writes, read and wrote."""
    optimizer.step()
    optimizer._state.stream.drain()
    return store.take("read"), store.take("write")


def plain_params(num_steps: int, num_params: int) -> list[nn.Parameter]:
    params = one_param_a_window(num_params)
    optimizer = Watched(params)
    for _ in range(num_steps):
        optimizer.step()
    return params


def assert_same(params: list[nn.Parameter], num_steps: int) -> None:
    for param, expected in zip(params, plain_params(num_steps, len(params)), strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("num_resident", [0, 1, 5, 8, 9, 11, 12, 100])
def test_only_the_others_move(num_resident: int, store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), num_resident) as optimizer:
        streamed = [w for w in range(NUM_WINDOWS) if w not in optimizer.plan.resident]
        read, written = step_and_settle(optimizer, store)
        assert (read, sorted(written)) == ([], streamed)
        for order in (streamed[::-1], streamed, streamed[::-1]):
            read, written = step_and_settle(optimizer, store)
            assert sorted(read) == sorted(order[NUM_SLOTS:])
            assert sorted(written) == streamed
    assert_same(params, 4)


@pytest.mark.parametrize("num_resident", [1, 5, 9, 12])
def test_reports_agree_with_the_plan(num_resident: int, store: FakeStore) -> None:
    with wrap(Watched(one_param_a_window(NUM_WINDOWS)), num_resident) as optimizer:
        plan = optimizer.plan
        for _ in range(2):  # new state is not read
            step_and_settle(optimizer, store)
            assert optimizer.report is not None
        counters = optimizer._state.stream.counters
        before = counters.read_bytes, counters.written_bytes
        for _ in range(4):
            step_and_settle(optimizer, store)
        assert counters.read_bytes - before[0] == 4 * plan.read_bytes_per_step
        assert counters.written_bytes - before[1] == 4 * plan.written_bytes_per_step
        assert optimizer.report.resident_bytes == plan.resident_bytes
        assert optimizer.report.saved_bytes == 0
        assert f"resident {num_resident * 64}.0 KiB" in str(optimizer.report)


def test_the_log_says_what_is_resident(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "optstream"):
        wrap(Watched(one_param_a_window(NUM_WINDOWS)), 5).close()
    text = "12 windows, 768.0 KiB of state, 5 of them (320.0 KiB) resident"
    assert any(text in record.getMessage() for record in caplog.records)


def test_the_drive_works_while_resident_windows_are_updated(store: FakeStore) -> None:
    """The update of each resident window waits until the next other one was read."""
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    with wrap(inner, 4) as optimizer:
        resident = optimizer.plan.resident
        step_and_settle(optimizer, store)
        inner.calls.clear()
        order = range(NUM_WINDOWS)[::-1]
        streamed = [window for window in order if window not in resident]

        def during(number: int) -> None:
            through = [w for w in streamed if w > order[number]]
            coming = streamed[len(through) : len(through) + NUM_SLOTS - 1]
            if order[number] in resident:
                wanted = {("read", window) for window in coming if window not in streamed[:4]}
                store.wait_for(lambda: wanted <= set(store.events))

        inner.during = during
        step_and_settle(optimizer, store)


def save(optimizer: StreamedOptimizer) -> dict[int, bytes]:
    """Return what a snapshot holds of each window."""
    snapshot = optimizer._saver.freezer.snapshot(0)
    return {
        window: open(f"/proc/self/fd/{file.fd}", "rb").read()[file.header_bytes :]
        for window, file in snapshot.files.items()
    }


@pytest.mark.parametrize("num_resident", [1, 5, 12])
def test_a_save_writes_resident_windows_once(num_resident: int, store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), num_resident) as optimizer:
        resident = sorted(optimizer.plan.resident)
        step_and_settle(optimizer, store)
        saved = save(optimizer)
        assert sorted(store.take("write")) == resident
        for window, data in saved.items():
            assert data == optimizer._state.stream.look(window, 0, WINDOW_BYTES).numpy().tobytes()
        assert save(optimizer) == saved
        assert store.take("write") == []
        params[resident[0]].grad = None
        step_and_settle(optimizer, store)
        assert optimizer.report is not None
        assert optimizer.report.saved_bytes == num_resident * WINDOW_BYTES
        assert f"({num_resident * 64}.0 KiB by a save)" in str(optimizer.report)
        again = save(optimizer)
        assert sorted(store.take("write")) == resident[1:]
        assert again[resident[0]] == saved[resident[0]]


def test_windows_without_gradients_are_left_alone(store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), 5) as optimizer:
        step_and_settle(optimizer, store)
        for param in params:
            param.grad = None
        assert step_and_settle(optimizer, store) == ([], [])
        save(optimizer)
        store.take("write")
        save(optimizer)
        assert store.take("write") == []


def load_what_was_saved(optimizer: StreamedOptimizer) -> None:
    """Take the store's bytes for the state, as a load that links files back does."""
    stream = optimizer._state.stream
    stream.replace(set(range(NUM_WINDOWS)))


@pytest.mark.parametrize("num_resident", [1, 5, 9, 12])
def test_what_was_loaded_is_read_once(num_resident: int, store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), num_resident) as optimizer:
        resident = optimizer.plan.resident
        step_and_settle(optimizer, store)
        save(optimizer)
        load_what_was_saved(optimizer)
        store.take("write")
        read, _ = step_and_settle(optimizer, store)
        assert len(read) == len(set(read))
        assert resident <= set(read)
        for _ in range(3):
            read, _ = step_and_settle(optimizer, store)
            assert resident.isdisjoint(read)
    assert_same(params, 5)


def test_a_resident_window_that_cannot_be_read(store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), 5) as optimizer:
        bad = max(optimizer.plan.resident)
        step_and_settle(optimizer, store)
        save(optimizer)
        load_what_was_saved(optimizer)

        def before(verb: str, window: int) -> None:
            if (verb, window) == ("read", bad):
                raise WindowReadError("fake", 0, 4096, errno.EIO)

        store.before = before
        with pytest.raises(WindowReadError):
            optimizer.step()
        store.before = lambda verb, window: None
        optimizer.step()
        step_and_settle(optimizer, store)
    assert_same(params, 3)


class Refusing:
    """A drive that writes no window of a set."""

    def __init__(self, *windows: int) -> None:
        self.windows = set(windows)

    def __call__(self, verb: str, window: int) -> None:
        if verb == "write" and window in self.windows:
            raise WindowWriteError("fake", 0, 4096, errno.EIO)


@pytest.mark.parametrize("at", ["write", "prepare"])
def test_what_a_save_cannot_write_it_copies_from_memory(
    at: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), 5) as optimizer:
        resident = sorted(optimizer.plan.resident)
        step_and_settle(optimizer, store)
        step_and_settle(optimizer, store)
        refusing = Refusing(*resident[1:3])
        if at == "write":
            store.before = refusing
        else:
            monkeypatch.setattr(store, "prepare_write", lambda window: refusing("write", window))
        saved = save(optimizer)
        assert sorted(store.take("write")) == [resident[0], *resident[3:]]
        for window in range(NUM_WINDOWS):
            now = optimizer._state.stream.look(window, 0, WINDOW_BYTES)
            assert saved[window] == now.numpy().tobytes()
        step_and_settle(optimizer, store)  # nobody stops for that
        refusing.windows.clear()
        save(optimizer)
        assert sorted(store.take("write"))[:5] == resident
        step_and_settle(optimizer, store)
    assert_same(params, 4)


def test_no_memory_for_such_copies_is_an_error_that_changes_nothing(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(Watched(params), 5) as optimizer:
        step_and_settle(optimizer, store)
        store.before = Refusing(*optimizer.plan.resident)
        with monkeypatch.context() as patched:
            patched.setattr("optstream.stream.frozen.read_available_bytes", lambda: 2**16)
            with pytest.raises(WindowWriteError):
                optimizer.state_dict()
        step_and_settle(optimizer, store)
        store.before = lambda verb, window: None
        save(optimizer)
        step_and_settle(optimizer, store)
    assert_same(params, 3)


def test_a_step_waits_for_the_write_of_a_save_that_was_interrupted(store: FakeStore) -> None:
    """The user pressed Ctrl-C while the drive hung; its thread still reads the buffer."""
    params = one_param_a_window(NUM_WINDOWS)
    gate = threading.Event()
    with wrap(inner := Watched(params), 5) as optimizer:
        stream = optimizer._state.stream
        step_and_settle(optimizer, store)
        store.before = lambda verb, window: gate.wait(WAIT_S)
        with stream._changed:  # as far as a save comes
            for window, slot in stream._resident._slots.items():
                stream._transfers.write(slot, window, {})
        threading.Timer(0.2, gate.set).start()
        inner.calls.clear()
        order = range(NUM_WINDOWS)[::-1]
        through: list[bool] = []

        def during(number: int) -> None:
            if order[number] in optimizer.plan.resident:
                through.append(gate.is_set())

        inner.during = during
        optimizer.step()
        assert through == [True] * 5
        inner.during = lambda number: None
        step_and_settle(optimizer, store)
        assert set(save(optimizer)) == set(range(NUM_WINDOWS))
    assert_same(params, 3)


@pytest.mark.parametrize("saved", [True, False])
def test_an_update_that_fails(saved: bool, store: FakeStore) -> None:
    """Its window is read again where the drive has it, and kept where it has not."""
    params = one_param_a_window(NUM_WINDOWS)
    with wrap(inner := Watched(params), 12) as optimizer:
        step_and_settle(optimizer, store)
        if saved:
            save(optimizer)
        inner.calls.clear()

        def fail(number: int) -> None:
            if number == 3:
                raise ZeroDivisionError

        inner.during = fail
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        inner.during = lambda number: None
        read, _ = step_and_settle(optimizer, store)
        assert read == ([8] if saved else [])
        step_and_settle(optimizer, store)
    assert_same(params, 3)


def test_a_group_that_comes_later(store: FakeStore) -> None:
    """Windows stay where they are; the budget's rest goes to new ones."""
    params = one_param_a_window(NUM_WINDOWS)
    early, late = params[:6], params[6:]
    with wrap(Watched(early), 6) as optimizer:
        step_and_settle(optimizer, store)
        optimizer.add_param_group({"params": late})
        assert optimizer.plan.num_windows == NUM_WINDOWS
        assert optimizer.plan.resident == set(range(6))
        for _ in range(3):
            read, written = step_and_settle(optimizer, store)
            assert set(read) | set(written) <= set(range(6, NUM_WINDOWS))
    assert_same(early, 4)


def test_a_share_of_the_state_grows_with_it(store: FakeStore) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    inner = Watched(params[:6])
    with optstream.offload(inner, "/", window="64KiB", store="fake", ram="50%") as optimizer:
        before = optimizer.plan.resident
        assert len(before) == 3
        step_and_settle(optimizer, store)
        optimizer.add_param_group({"params": params[6:]})
        assert optimizer.plan.resident > before
        assert optimizer.plan.num_resident == 6
        for _ in range(3):
            step_and_settle(optimizer, store)
        assert set(save(optimizer)) == set(range(NUM_WINDOWS))
    assert_same(params[:6], 4)


def test_a_group_without_memory_for_it_is_not_added(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    inner = Watched(params[:6])
    with optstream.offload(inner, "/", window="64KiB", store="fake", ram="50%") as optimizer:
        step_and_settle(optimizer, store)
        plan = optimizer.plan

        def refused(num_bytes: int) -> memoryview:
            raise OSError(errno.ENOMEM, "")

        with monkeypatch.context() as patched:
            patched.setattr("optstream.stream.resident.allocate_memory", refused)
            with pytest.raises(OutOfSpaceError, match=r"need 192\.0 KiB of memory, .* smaller ram"):
                optimizer.add_param_group({"params": params[6:]})
        assert optimizer.plan is plan
        assert len(store._specs) == plan.num_windows
        assert len(optimizer.param_groups) == 1
        step_and_settle(optimizer, store)
        optimizer.add_param_group({"params": params[6:]})
        step_and_settle(optimizer, store)
    assert_same(params[:6], 3)


def test_memory_holds_everything_whatever_the_budget(install: Install) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    inner = Watched(params)
    with optstream.offload(inner, "/", window="64KiB", store="memory", ram="64KiB") as optimizer:
        plan = optimizer.plan
        assert plan.num_resident == NUM_WINDOWS
        for _ in range(3):
            optimizer.step()
        assert optimizer.report is not None
        assert optimizer.report.resident_bytes == plan.data_bytes
        assert optimizer.report.written_bytes == optimizer.report.read_bytes == 0
        assert len(save(optimizer)) == NUM_WINDOWS
        optimizer.step()
        assert optimizer.report.written_bytes == optimizer.report.saved_bytes == 0
    assert_same(params, 4)
