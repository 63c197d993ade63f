"""Every read and every write of a run fails once; nothing is lost, nothing hangs."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from faults.drive import FaultyDrive, Interrupted, assert_nothing_left, failing, short
from faults.model import assert_same, make_optimizer, make_params, reference, set_grads
from optstream.errors import WindowIOError, WindowReadError, WindowWriteError

NUM_STEPS = 3
"""Whose transfers fail; one more step follows, which reads what they left."""

ERRORS = {
    "preadv": (WindowReadError, "read"),
    "pwritev": (WindowWriteError, "write"),
}
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.slow)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)


@dataclass
class Run:
    """Steps of a streamed optimizer that are taken again where an error says so."""

    directory: Path
    dtype: torch.dtype = torch.float32
    window: str = "64KiB"
    ram: str = "0"
    errors: list[WindowIOError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = make_params(self.dtype)
        self.optimizer = optstream.offload(
            make_optimizer(self.params), self.directory, window=self.window, ram=self.ram
        )

    def train(self, on_error: Callable[[], None]) -> None:
        for step in range(NUM_STEPS + 1):
            set_grads(self.params, step)
            while not self.step(on_error):
                pass

    def step(self, on_error: Callable[[], None]) -> bool:
        """Return whether the step is complete."""
        try:
            self.optimizer.step()
        except WindowIOError as error:
            self.errors.append(error)
            on_error()
            return "was applied in full" in str(error)
        return True


def count_calls(drive: FaultyDrive, run: Run, name: str) -> tuple[int, int]:
    """Return the number of the first transfer of the steps, and of the first behind them."""
    first = drive.num_calls.get(name, 0)
    for step in range(NUM_STEPS):
        set_grads(run.params, step)
        run.optimizer.step()
    run.optimizer.close()
    last, drive.num_calls = drive.num_calls.get(name, 0), {}
    return first, last


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    [
        ("preadv", errno.EIO, torch.float32),
        pytest.param("preadv", errno.EIO, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("pwritev", errno.EIO, torch.bfloat16, marks=pytest.mark.slow),
        ("pwritev", errno.ENOSPC, torch.float32),
    ],
    ids=["read-EIO", "read-EIO-bf16", "write-EIO-bf16", "write-ENOSPC"],
)
def test_every_transfer_fails_until_the_drive_is_mended(
    name: str, number: int, dtype: torch.dtype, drive: FaultyDrive, directory: Path
) -> None:
    kind, verb = ERRORS[name]
    first, last = count_calls(drive, Run(directory, dtype), name)
    assert last - first > 4
    expected = reference(dtype, NUM_STEPS + 1)
    for index in range(first, last):
        drive.num_calls = {}
        drive.fail(name, index, failing(number))
        run = Run(directory, dtype)
        with run.optimizer:
            run.train(on_error=drive.mend)
        assert len(run.errors) == 1, index
        (error,) = run.errors
        assert isinstance(error, kind)
        assert error.errno == number
        assert error.filename.startswith(str(directory))
        assert error.offset % 4096 == 0
        assert 0 < error.num_bytes <= 64 * 1024
        numbers = f"cannot {verb} {error.num_bytes} bytes at offset {error.offset} of"
        assert str(error).startswith(numbers)
        assert f"(errno {number})" in str(error)
        assert re.search(
            r"step \d (has updated \d+ windows.*; call step\(\) again with the same gradients"
            r"|was applied in full)",
            str(error),
        )
        assert_same(run.params, expected, index)
        assert_nothing_left(directory)
        drive.mend()


@DTYPES
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_every_transfer_fails_once(
    name: str, dtype: torch.dtype, drive: FaultyDrive, directory: Path
) -> None:
    """Noticed or not (a write behind the step is tried again by the next), the result is right."""
    first, last = count_calls(drive, Run(directory, dtype), name)
    expected = reference(dtype, NUM_STEPS + 1)
    for index in range(first, last):
        drive.num_calls, drive.num_failures = {}, 0

        def once(*args: object) -> int:
            drive.mend()
            return failing(errno.EIO)(*args)

        drive.fail(name, index, once)
        run = Run(directory, dtype)
        with run.optimizer:
            run.train(on_error=lambda: None)
        assert drive.num_failures == 1
        assert len(run.errors) <= 1, index
        assert_same(run.params, expected, index)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("answer", [short, Interrupted()], ids=["short", "EINTR"])
def test_a_transfer_in_parts_is_no_error(
    name: str, answer: Callable[..., int], drive: FaultyDrive, directory: Path
) -> None:
    drive.fail(name, 0, answer)
    run = Run(directory)
    with run.optimizer:
        run.train(on_error=lambda: None)
    assert drive.num_failures > 4
    assert run.errors == []
    assert_same(run.params, reference(torch.float32, NUM_STEPS + 1))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_transfers_fail_while_other_windows_are_resident(
    name: str, drive: FaultyDrive, directory: Path
) -> None:
    first, last = count_calls(drive, Run(directory, ram="40%"), name)
    assert last - first > 2
    expected = reference(torch.float32, NUM_STEPS + 1)
    for index in range(first, last):
        drive.num_calls = {}
        drive.fail(name, index, failing(errno.EIO))
        run = Run(directory, ram="40%")
        with run.optimizer:
            run.train(on_error=drive.mend)
        # a second one can have failed just before the drive was mended
        assert 1 <= len(run.errors) <= 2, index
        assert all(isinstance(error, ERRORS[name][0]) for error in run.errors)
        assert_same(run.params, expected, index)
        drive.mend()


def test_a_drive_that_fails_for_good_ends_no_step_of_resident_windows(
    drive: FaultyDrive, directory: Path
) -> None:
    run = Run(directory, ram="100%")
    with run.optimizer:
        for name in ("preadv", "pwritev"):
            drive.fail(name, 0, failing(errno.EIO))
            run.train(on_error=drive.mend)
        assert run.errors == []
    assert drive.num_failures == 0


def test_one_piece_of_a_window_fails(drive: FaultyDrive, directory: Path) -> None:
    """A window is several transfers, on several threads; the others succeed."""
    params = [nn.Parameter(torch.zeros(3 * 2**20))]
    params[0].grad = torch.ones_like(params[0])
    with optstream.offload(make_optimizer(params), directory, window="64MiB") as optimizer:

        def answer(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
            second = at >= 8 * 2**20
            return failing(errno.EIO)() if second else real(fd, [buffer], at)

        drive.fail("pwritev", 0, answer)

        def steps() -> None:
            for _ in range(50):  # a write may fail behind its step, or while the next one waits
                optimizer.step()
                time.sleep(0.02)

        with pytest.raises(WindowWriteError) as caught:
            steps()
        assert caught.value.offset >= 8 * 2**20
        drive.mend()
        optimizer.step()


@DTYPES
def test_no_write_ever_works(dtype: torch.dtype, drive: FaultyDrive, directory: Path) -> None:
    run = Run(directory, dtype)
    with run.optimizer as optimizer:
        drive.fail("pwritev", 0, failing(errno.ENOSPC))
        set_grads(run.params, 0)
        with pytest.raises(WindowWriteError, match=r"has updated [1-9] windows"):
            optimizer.step()
        before = [param.detach().clone() for param in run.params]
        for _ in range(3):
            with pytest.raises(WindowWriteError, match="with the same gradients"):
                optimizer.step()
            assert_same(run.params, before)
        assert optimizer.report is None
    assert_nothing_left(directory)


def test_no_write_works_after_the_last_step(drive: FaultyDrive, directory: Path) -> None:
    run = Run(directory)
    with run.optimizer as optimizer:
        set_grads(run.params, 0)
        optimizer.step()
        drive.fail("pwritev", 0, failing(errno.EIO))
        set_grads(run.params, 1)
        with pytest.raises(WindowWriteError):
            optimizer.step()


def test_the_report_after_an_error_counts_the_whole_step(
    drive: FaultyDrive, directory: Path
) -> None:
    run = Run(directory)
    with run.optimizer as optimizer:
        drive.fail("pwritev", drive.num_calls["pwritev"] + 4, failing(errno.EIO))
        set_grads(run.params, 0)
        assert not run.step(drive.mend)
        optimizer.step()
        report = optimizer.report
        assert report is not None
        assert report.step == 1
        assert report.num_windows == optimizer.plan.num_windows
        spent = report.update_s + report.read_wait_s + report.write_wait_s
        assert 0 < spent <= report.total_s
