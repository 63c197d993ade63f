"""Steps that do not end: the optimizer raises, the user interrupts, the process is told to go."""

from __future__ import annotations

import _thread
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import optstream
from faults.drive import FaultyDrive
from faults.model import assert_same, make_params, reference, set_grads

NUM_STEPS = 3
NUM_INTERRUPTS = 100
EXIT_S = 60
"""How long a child may take to end; imports are most of it."""


class Raising(torch.optim.AdamW):
    """AdamW that raises at a call of its step, and not again."""

    raises: BaseException | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # in a list: attributes that a step sets are those of a whole step, not of its calls
        self.calls_left = [-1]

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        return True

    def step(self, closure: Any = None) -> Any:
        self.calls_left[0] -= 1
        if self.raises is not None and self.calls_left[0] == 0:
            raise self.raises
        return super().step(closure)


def offload(params: list[torch.nn.Parameter], directory: Path) -> tuple[Raising, Any]:
    inner = Raising(params, lr=0.01, weight_decay=0.1)
    return inner, optstream.offload(inner, directory, window="64KiB")


@pytest.mark.parametrize("error", [ZeroDivisionError("user"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_raises_at_every_call(
    error: BaseException, dtype: torch.dtype, directory: Path
) -> None:
    """Its window is dropped, not written; the same step again gives the same bits."""
    expected = reference(dtype, NUM_STEPS)
    for at_call in (1, 2, 5, 9):
        for at_step in range(NUM_STEPS):
            params = make_params(dtype)
            inner, optimizer = offload(params, directory)
            with optimizer:
                for step in range(NUM_STEPS):
                    set_grads(params, step)
                    if step == at_step:
                        inner.raises, inner.calls_left = error, [at_call]
                        with pytest.raises(type(error)):
                            optimizer.step()
                    optimizer.step()
            assert_same(params, expected, (at_call, at_step))


def test_close_after_the_optimizer_raised(directory: Path) -> None:
    params = make_params()
    inner, optimizer = offload(params, directory)
    set_grads(params, 0)
    inner.raises, inner.calls_left = ZeroDivisionError(), [3]
    with pytest.raises(ZeroDivisionError), optimizer:
        optimizer.step()


def test_an_interrupt_while_waiting_for_the_drive(drive: FaultyDrive, directory: Path) -> None:
    """The drive hangs, the user presses Ctrl-C, the drive goes on: so does training."""
    params = make_params()
    _, optimizer = offload(params, directory)
    waiting, go_on = threading.Event(), threading.Event()

    def hang(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
        waiting.set()
        go_on.wait()
        return real(fd, [buffer], at)

    def interrupt() -> None:
        waiting.wait()
        time.sleep(0.2)  # until the step waits, too
        os.kill(os.getpid(), signal.SIGINT)

    with optimizer:
        drive.fail("pwritev", drive.num_calls["pwritev"], hang)
        set_grads(params, 0)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        thread.join()
        go_on.set()
        for step in range(NUM_STEPS):
            set_grads(params, step)
            optimizer.step()
    assert_same(params, reference(torch.float32, NUM_STEPS))


def test_interrupts_at_any_moment_hang_nothing(directory: Path) -> None:
    """What was half-way cannot be right then; but each next step runs, and closing ends."""
    params = make_params()
    _, optimizer = offload(params, directory)
    draw = random.Random(0)
    num_interrupted = 0
    with optimizer:
        for step in range(NUM_INTERRUPTS):
            set_grads(params, step)
            start = time.perf_counter()
            optimizer.step()
            timer = threading.Timer(
                draw.uniform(0, time.perf_counter() - start), _thread.interrupt_main
            )
            try:
                timer.start()
                optimizer.step()
                num_interrupted -= 1
                timer.join()
                time.sleep(1)  # the interrupt arrives here at the latest
            except KeyboardInterrupt:
                num_interrupted += 1
            timer.join()
    assert num_interrupted > NUM_INTERRUPTS // 2
    assert all(torch.isfinite(param).all() for param in params)


def test_the_directory_is_deleted_under_a_run(directory: Path) -> None:
    """Nameless files need no directory."""
    params = make_params()
    _, optimizer = offload(params, directory)
    with optimizer:
        for step in range(NUM_STEPS):
            set_grads(params, step)
            optimizer.step()
            if step == 0:
                shutil.rmtree(directory)
    assert_same(params, reference(torch.float32, NUM_STEPS))


CHILD = """
import signal, sys, threading, time
import torch
import optstream

torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.zeros(1000, 100)) for _ in range(4)]
optimizer = torch.optim.AdamW(params)
optimizer = optstream.offload(optimizer, sys.argv[1], window="64KiB")
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
print("stepped", flush=True)
{ending}
"""

ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit": ("optimizer.step(); sys.exit(3)", 3),
    "an exception in the middle of a step": (
        "kind, calls = type(optimizer).step, [0]\n"
        "def stop(*args):\n"
        "    calls[0] += 1\n"
        "    if calls[0] == 50: raise ValueError('user')\n"
        "sys.setprofile(stop)\n"
        "optimizer.step()",
        1,
    ),
    "Ctrl-C": ("while True: optimizer.step()", -signal.SIGINT),
    "Ctrl-C, and the user closes": (
        "try:\n"
        "    while True: optimizer.step()\n"
        "except KeyboardInterrupt:\n"
        "    optimizer.close()\n"
        "assert not any('optstream' in thread.name for thread in threading.enumerate())\n"
        "sys.exit(7)",
        7,
    ),
    "SIGKILL": ("while True: optimizer.step()", -signal.SIGKILL),
    "SIGTERM": ("while True: optimizer.step()", -signal.SIGTERM),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_way_to_end_ends_and_leaves_nothing(ending: str, directory: Path) -> None:
    code, expected = ENDINGS[ending]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(ending=code), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "stepped\n"
        number = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}.get(ending)
        if number is None and "Ctrl-C" in ending:
            number = signal.SIGINT
        if number is not None:
            time.sleep(random.uniform(0.01, 0.3))
            child.send_signal(number)
        child.communicate(timeout=EXIT_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == expected
    assert list(directory.glob("*")) == []
