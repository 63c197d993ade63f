"""Saves that begin while the last step is still being written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import optstream
from checkpoint.runs import (
    after,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from optstream.errors import WindowWriteError

WAIT_S = 20
WINDOW = "100KiB"  # as many as there are slots, so that a step ends with all writes under way
RAM = pytest.mark.parametrize("ram", [0, "50%"])


class HeldDrive:
    """Holds back what is written to one filesystem, by other threads than the one that trains."""

    def __init__(self, path: Path) -> None:
        self.go = threading.Event()
        self.failing = False
        self.num_held = 0
        self._device = path.stat().st_dev
        self._real: Any = os.pwritev

    def __call__(self, fd: int, buffers: Any, at: int) -> int:
        if os.fstat(fd).st_dev == self._device and "drive" in threading.current_thread().name:
            self.num_held += 1
            assert self.go.wait(WAIT_S)
            if self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(self._real(fd, buffers, at))


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDrive]:
    drive = HeldDrive(tmp_path)
    monkeypatch.setattr(os, "pwritev", drive)
    drive.go.set()
    yield drive
    drive.go.set()


def resumed(tmp_path: Path, checkpoint: Path, at_save: Any, num_steps: int) -> Any:
    """Return the weights of a new run that goes on from a checkpoint of `num_steps` steps."""
    optstream.verify(checkpoint)
    params, optimizer = streamed(tmp_path / "resumed", seed=1)
    with optimizer:
        set_weights(params, at_save)
        optimizer.load(checkpoint)
        go_on(params, optimizer, range(num_steps, num_steps + 2))
    return weights(params)


@RAM
def test_a_save_does_not_wait_for_the_step_before_it(
    ram: Any, tmp_path: Path, held: HeldDrive
) -> None:
    params, optimizer = streamed(tmp_path / "live", window=WINDOW, ram=ram)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "older")
        held.go.clear()
        go_on(params, optimizer, [2])
        at_save = weights(params)
        saving = optimizer.save(tmp_path / "checkpoint", wait=False)
        assert held.num_held
        assert not saving.done
        assert not (tmp_path / "checkpoint").exists()
        threading.Timer(0.1, held.go.set).start()
        go_on(params, optimizer, range(3, 6))  # whose writes go elsewhere
        saving.wait()
        assert_same_bits(weights(params), after(6))
        older, expected = optimizer.state_dict(), weights(params)
    assert_same_bits(resumed(tmp_path, tmp_path / "checkpoint", at_save, 3), after(5))
    assert_same_bits(expected, after(6))
    del older
    assert_same_bits(resumed(tmp_path, tmp_path / "older", after(2), 2), after(4))


@RAM
def test_tensors_are_whole_when_they_are_handed_out(
    ram: Any, tmp_path: Path, held: HeldDrive
) -> None:
    params, optimizer = streamed(tmp_path / "live", window=WINDOW, ram=ram)
    other_params, other = streamed(tmp_path / "other", store="memory")
    with optimizer, other:
        go_on(other_params, other, range(2))
        held.go.clear()
        go_on(params, optimizer, range(1))
        threading.Timer(0.1, held.go.set).start()
        go_on(params, optimizer, [1])
        held.go.clear()
        threading.Timer(0.1, held.go.set).start()
        assert_same_state(copied(optimizer.state_dict()), copied(other.state_dict()))


@RAM
def test_a_write_that_fails_under_a_save(
    ram: Any, tmp_path: Path, small_drive: Path, held: HeldDrive
) -> None:
    """To another drive it has the bytes from memory; to the one that fails it is an error."""
    params, optimizer = streamed(tmp_path / "live", window=WINDOW, ram=ram)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer._state.stream.drain()
        for place in (small_drive, tmp_path):
            held.go.clear()
            held.failing = True
            step = optimizer._reporter.next_step - 1
            go_on(params, optimizer, [step])
            at_save = weights(params)
            saving = optimizer.save(place / "checkpoint", wait=False)
            held.go.set()
            if place is small_drive:
                saving.wait()
            held.failing = False
            optimizer._state.stream.drain()
        saving.wait()
        go_on(params, optimizer, [4])
    assert_same_bits(weights(params), after(5))
    assert_same_bits(resumed(tmp_path, small_drive / "checkpoint", after(3), 3), after(5))
    assert_same_bits(resumed(tmp_path, tmp_path / "checkpoint", at_save, 4), after(6))


@RAM
def test_no_memory_for_what_fails_under_a_save(
    ram: Any, tmp_path: Path, held: HeldDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = streamed(tmp_path / "live", window=WINDOW, ram=ram)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        held.go.clear()
        held.failing = True
        go_on(params, optimizer, [2])
        with monkeypatch.context() as short:
            short.setattr("optstream.stream.frozen.read_available_bytes", lambda: 2**10)
            saving = optimizer.save(tmp_path / "checkpoint", wait=False)
            held.go.set()
            with pytest.raises(WindowWriteError):
                saving.wait()
        held.failing = False
        assert_same_bits(resumed(tmp_path, tmp_path / "checkpoint", after(2), 2), after(4))
        go_on(params, optimizer, [3])
        optimizer.save(tmp_path / "checkpoint")
    assert_same_bits(resumed(tmp_path, tmp_path / "checkpoint", after(4), 4), after(6))
