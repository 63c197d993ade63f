"""Real processes that form a gloo group, for one test at a time."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

_TIMEOUT_S = 60


@dataclass(frozen=True)
class Outcome:
    """What one rank's program returned or raised; `error` is None where a rank was killed."""

    value: Any = None
    error: str | None = None
    trace: str = ""


Run = Callable[..., list[Outcome]]


def _load(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a test's file, which is no importable module."""
    spec = importlib.util.spec_from_file_location("program", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


def _rank(
    rank: int, size: int, meeting: str, answer: Connection, file: str, name: str, args: Any
) -> None:
    torch.set_num_threads(1)
    outcome = Outcome()
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        outcome = Outcome(value=_load(file, name)(*args))
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    # not answer.send: tensors would be shared with a process that is about to end
    answer.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # what a test leaves half-way must not keep the process


@pytest.fixture(scope="session")
def processes() -> Any:
    """Return a context whose processes are forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    # torch imports _dynamo when its first optimizer is made, which takes a second, as the last two
    modules = ["optstream.gradients", "optstream.muon", "torch._dynamo"]
    modules += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    context.set_forkserver_preload(modules)
    return context


@pytest.fixture
def outcomes(processes: Any, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs a program on so many ranks and gives their outcomes.

    A program is a function at the top of a test's file; it finds the group made.
    """
    started: list[Any] = []

    def run(size: int, program: Callable[..., Any], *args: Any) -> list[Outcome]:
        meeting = tmp_path / f"meeting{len(started)}"
        pipes = [processes.Pipe(duplex=False) for _ in range(size)]
        for rank, (_, answer) in enumerate(pipes):
            where = (inspect.getfile(program), program.__name__)
            process = processes.Process(
                target=_rank, args=(rank, size, str(meeting), answer, *where, args)
            )
            process.start()
            answer.close()
            started.append(process)
        end = time.monotonic() + _TIMEOUT_S
        found = []
        for rank, (question, _) in enumerate(pipes):
            assert question.poll(max(0.1, end - time.monotonic())), f"rank {rank} hangs"
            try:
                found.append(pickle.loads(question.recv_bytes()))
            except EOFError:
                found.append(Outcome())
        return found

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def ranks(outcomes: Run) -> Callable[..., list[Any]]:
    """Return a function that runs a program on so many ranks and gives what each returned."""

    def run(size: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        found = outcomes(size, program, *args)
        for rank, outcome in enumerate(found):
            assert outcome.error is None, f"rank {rank}: {outcome.trace}"
        return [outcome.value for outcome in found]

    return run
