"""Reports say what was done: bytes of transfers that ended, waits that were, the right words."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import ConfigError
from optstream.memory import read_memory
from optstream.report import StepReport
from stream.fake import WAIT_S, FakeStore, Watched, one_param_a_window

NUM_WINDOWS = 12
Install = Callable[[FakeStore], FakeStore]


def train(optimizer: optstream.StreamedOptimizer, num_steps: int) -> list[StepReport]:
    reports = []
    for _ in range(num_steps):
        optimizer.step()
        assert optimizer.report is not None
        reports.append(optimizer.report)
    return reports


def total(reports: Sequence[StepReport], name: str) -> float:
    return sum(getattr(report, name) for report in reports)


@pytest.mark.parametrize("num_steps", [2, 6])
def test_bytes_of_all_steps_equal_the_plan(num_steps: int, install: Install) -> None:
    store = install(FakeStore())
    params = one_param_a_window(NUM_WINDOWS)
    with optstream.offload(
        Watched(params), "/", window="64KiB", store="fake", io_threads=1
    ) as optimizer:
        plan = optimizer.plan
        optimizer.step()  # new state is not read
        first = plan.num_windows
        store.wait_for(lambda: len(store.events) == first)
        reports = train(optimizer, num_steps)
        num_reads = num_steps * (NUM_WINDOWS - 4)
        store.wait_for(lambda: len(store.events) == first + num_steps * first + num_reads)
        time.sleep(0.1)  # from the end of a transfer to its count
        optimizer.zero_grad()
        reports += train(optimizer, 1)
        assert total(reports, "read_bytes") == num_steps * plan.read_bytes_per_step
        written = total(reports, "written_bytes")
        assert num_steps * plan.written_bytes_per_step <= written
        assert written <= num_steps * plan.written_bytes_per_step + 4 * 64 * 1024
        assert reports[-1].num_windows == 0
        assert total(train(optimizer, 2), "written_bytes") == 0


def test_bytes_are_those_that_were_moved(tmp_path: Path) -> None:
    """On a drive, with all threads, to the byte: the kernel's own count of this process."""
    params = [nn.Parameter(torch.zeros(1024, 1024)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    with optstream.offload(torch.optim.AdamW(params), tmp_path, window="1MiB") as optimizer:
        moved_before = kernel_bytes()
        reports = train(optimizer, 4)
        optimizer.zero_grad()
        expected = 4 * optimizer.plan.written_bytes_per_step
        deadline = time.monotonic() + WAIT_S
        while total(reports, "written_bytes") < expected and time.monotonic() < deadline:
            reports += train(optimizer, 1)
        moved = [b - a for a, b in zip(moved_before, kernel_bytes(), strict=True)]
        assert total(reports, "written_bytes") == expected
        if moved[1] == 0:
            pytest.skip("this filesystem does no direct I/O that the kernel counts")
        # the process reads and writes a little besides: code pages, logs
        assert 0 <= moved[0] - total(reports, "read_bytes") < 2**20
        assert 0 <= moved[1] - expected < 2**20


def kernel_bytes() -> list[int]:
    """Return the bytes this process caused to be read from and written to drives."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(lines["read_bytes"]), int(lines["write_bytes"])]


@pytest.mark.parametrize("slow", ["read", "write"])
def test_waits_are_where_the_step_waited(slow: str, install: Install) -> None:
    store = install(FakeStore())
    store.before = lambda verb, window: time.sleep(0.01 if verb == slow else 0)
    inner = Watched(one_param_a_window(NUM_WINDOWS))
    with optstream.offload(inner, "/", window="64KiB", store="fake") as optimizer:
        report = train(optimizer, 3)[-1]
    assert getattr(report, f"{slow}_wait_s") > 0.01
    parts = report.read_wait_s + report.write_wait_s + report.update_s
    assert parts <= report.total_s


def test_memory_is_that_of_the_process(tmp_path: Path) -> None:
    with optstream.offload(Watched(one_param_a_window(2)), tmp_path) as optimizer:
        report = train(optimizer, 1)[0]
        now = read_memory()
        assert abs(report.anon_bytes - now.anon_bytes) < 64 * 2**20
        assert abs(report.file_bytes - now.file_bytes) < 64 * 2**20
        assert report.limit_bytes == now.limit_bytes


def test_windows_with_gradients_are_counted(tmp_path: Path) -> None:
    params = one_param_a_window(NUM_WINDOWS)
    with optstream.offload(Watched(params), tmp_path, window="64KiB") as optimizer:
        assert train(optimizer, 1)[0].num_windows == NUM_WINDOWS
        for param in params[3:]:
            param.grad = None
        assert train(optimizer, 1)[0].num_windows == 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_log_line_is_the_report(
    kind: type[torch.optim.Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    params = one_param_a_window(NUM_WINDOWS)
    inner = kind(params, lr=0.1, **options)  # type: ignore[call-arg]
    with (
        caplog.at_level(logging.INFO, "optstream"),
        optstream.offload(inner, tmp_path, window="64KiB") as optimizer,
    ):
        train(optimizer, 2)
        caplog.clear()
        report = train(optimizer, 1)[0]
        (record,) = caplog.records
    assert record.getMessage() == f"{kind.__name__} on rank 0, {report}"
    assert record.levelno == logging.INFO
    assert f"step 3: {report.num_windows} windows" in str(report)
    assert f"{report.total_s:.3f} s" in str(report)


def test_lines_of_the_file_are_the_reports(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"of": "an earlier run"}\n')
    with optstream.offload(
        Watched(one_param_a_window(3)), tmp_path / "state", window="64KiB", metrics=file
    ) as optimizer:
        reports = train(optimizer, 3)
        lines = file.read_text().splitlines()  # while it runs
    assert lines[0] == '{"of": "an earlier run"}'
    assert [json.loads(line) for line in lines[1:]] == [
        dataclasses.asdict(report) for report in reports
    ]
    assert [report.step for report in reports] == [1, 2, 3]


@pytest.mark.parametrize("metrics", ["missing/metrics.jsonl", ".", 5, "nul\0"])
def test_a_file_that_cannot_be_written_is_an_error_at_once(metrics: object, tmp_path: Path) -> None:
    path = tmp_path / metrics if isinstance(metrics, str) else metrics
    state = tmp_path / "state"
    with pytest.raises(ConfigError, match="cannot write metrics to"):
        optstream.offload(
            Watched(one_param_a_window(1)),
            state,
            metrics=path,  # type: ignore[arg-type]
        )
    assert not state.exists()


def test_a_file_that_fills_its_drive_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with optstream.offload(
        Watched(one_param_a_window(2)), tmp_path, metrics="/dev/full"
    ) as optimizer:
        reports = train(optimizer, 3)
    assert [report.step for report in reports] == [1, 2, 3]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["no more metrics are written to /dev/full: No space left on device"]
