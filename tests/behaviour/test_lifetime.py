"""From wrapping to closing: nothing stays behind, however it ends."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import StateChangedError
from optstream.streamed.state import StreamedState

STORES = pytest.mark.parametrize("store", ["direct", "mapped", "memory"])


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except OSError:
            continue  # the descriptor of this listing itself
    return found


def running() -> set[str]:
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    gc.collect()
    before = descriptors(), running()
    yield
    gc.collect()
    assert descriptors() <= before[0]
    assert running() <= before[1]
    assert not list(tmp_path.iterdir())


def stepped(directory: Path, store: str = "direct") -> optstream.StreamedOptimizer:
    params = [nn.Parameter(torch.ones(100, 300)) for _ in range(3)]
    optimizer = optstream.offload(torch.optim.AdamW(params), directory, window="64KiB", store=store)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@STORES
def test_close(store: str, tmp_path: Path) -> None:
    optimizer = stepped(tmp_path, store)
    optimizer.close()
    optimizer.close()


@STORES
def test_context_manager(store: str, tmp_path: Path) -> None:
    with stepped(tmp_path, store) as optimizer:
        assert optimizer.report is not None
    with pytest.raises(KeyError), stepped(tmp_path, store):
        raise KeyError


@STORES
def test_collected_without_close(store: str, tmp_path: Path) -> None:
    optimizer = stepped(tmp_path, store)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    del optimizer, scheduler


@STORES
def test_use_after_close(store: str, tmp_path: Path) -> None:
    optimizer = stepped(tmp_path, store)
    optimizer.close()
    with pytest.raises(optstream.OffloadError, match="closed"):
        optimizer.step()
    with pytest.raises(optstream.OffloadError, match="closed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.zero_grad()
    assert optimizer.plan.num_windows > 0


@pytest.mark.parametrize("role", ["", "actor"])
@pytest.mark.parametrize("store", ["direct", "mapped"])
def test_directories_that_were_made_are_removed(store: str, role: str, tmp_path: Path) -> None:
    directories = [tmp_path / "a" / "b", tmp_path / "c"]
    params = [nn.Parameter(torch.ones(100, 300))]
    inner = torch.optim.AdamW(params)
    optstream.offload(inner, directories, window="64KiB", store=store, role=role).close()
    assert not list(tmp_path.iterdir())
    for directory in directories:
        directory.mkdir(parents=True)
    optstream.offload(inner, directories, window="64KiB", store=store, role=role).close()
    for directory in directories:
        directory.rmdir()
    (tmp_path / "a").rmdir()


def test_a_directory_with_something_in_it_stays(tmp_path: Path) -> None:
    optimizer = stepped(tmp_path / "state")
    optimizer.save(tmp_path / "state" / "checkpoint")
    optimizer.close()
    optstream.verify(tmp_path / "state" / "checkpoint")
    shutil.rmtree(tmp_path / "state")


def test_one_that_shares_a_directory_goes_on_without_it(tmp_path: Path) -> None:
    """Its files have no names, so that the directory looks empty when the first one closes."""
    first, second = stepped(tmp_path / "state"), stepped(tmp_path / "state")
    first.close()
    second.step()
    second.save(tmp_path / "state" / "checkpoint")
    second.step()
    optstream.verify(tmp_path / "state" / "checkpoint")
    shutil.rmtree(tmp_path / "state" / "checkpoint")
    second.close()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("role", ["", "actor"])
@pytest.mark.parametrize("store", ["direct", "mapped"])
def test_a_wrap_that_fails_late(
    store: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All space is reserved by then and all files are open."""

    def fail(state: StreamedState, states: object) -> None:
        raise StateChangedError("as told")

    param = nn.Parameter(torch.ones(100, 300))
    inner = torch.optim.SGD([param], momentum=0.9)
    param.grad = torch.ones_like(param)
    inner.step()
    monkeypatch.setattr(StreamedState, "put", fail)
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(StateChangedError):
        optstream.offload(inner, tmp_path / "a" / "b", store=store, role=role, metrics=metrics)
    assert not list(tmp_path.iterdir())
    assert inner.state[param]["momentum_buffer"].all()
    inner.step()


def test_metrics_without_a_line_are_removed_if_they_were_made(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    inner = torch.optim.SGD([nn.Parameter(torch.ones(4))], momentum=0.9)
    optstream.offload(inner, tmp_path, metrics=metrics).close()
    assert not metrics.exists()
    metrics.touch()
    optstream.offload(inner, tmp_path, metrics=metrics).close()
    metrics.unlink()


def test_close_before_any_step(tmp_path: Path) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(4))], momentum=0.9)
    optstream.offload(inner, tmp_path).close()


def test_a_step_that_failed(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(100, 300)) for _ in range(3)]
    optimizer = optstream.offload(torch.optim.AdamW(params), tmp_path, window="64KiB")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.close()


def test_metrics_are_closed(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    metrics = tmp_path_factory.mktemp("metrics") / "steps.jsonl"
    inner = torch.optim.SGD([nn.Parameter(torch.ones(4))], momentum=0.9)
    with optstream.offload(inner, tmp_path, metrics=metrics) as optimizer:
        inner.param_groups[0]["params"][0].grad = torch.ones(4)
        optimizer.step()
    assert metrics.read_text().count("\n") == 1


SCRIPT = """
import sys, torch, optstream
from torch import nn
params = [nn.Parameter(torch.ones(100, 300)) for _ in range(8)]
optimizer = optstream.offload(torch.optim.AdamW(params), sys.argv[1], window="64KiB")
for step in range(3):
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
{ending}
"""
SLOW_DRIVE = """
import time
from optstream.store.direct import Direct
for name in ("read", "write"):
    def late(self, *where, transfer=getattr(Direct, name)):
        time.sleep(0.3)
        transfer(self, *where)
    setattr(Direct, name, late)
"""
FAILING_UPDATE = """
from optstream.update import Updater
update = Updater.update
def fail_late(self, plan, window, *rest):
    if window is plan.windows[5]:
        raise SystemExit(3)
    update(self, plan, window, *rest)
Updater.update = fail_late
optimizer.step()
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("del optimizer", 0),
        (SLOW_DRIVE + "optimizer.step()", 0),
        (SLOW_DRIVE + FAILING_UPDATE, 3),
    ],
    ids=["end of script", "deleted", "writes under way", "in the middle of a step"],
)
def test_a_process_that_ends_without_close(ending: str, status: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending), tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "")
