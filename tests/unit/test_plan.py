"""Which tensors go in which window, and what the plan promises of bytes."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from optstream.plan import (
    EXTENT_ALIGNMENT,
    FIRST_RUN_BYTES,
    MASTER,
    MIN_WINDOW_BYTES,
    NUM_SLOTS,
    OVERHEAD_BYTES,
    SLICE_ALIGNMENT,
    Gathered,
    ParamSpec,
    Plan,
    StateTensor,
    Temporaries,
    parse_window_bytes,
)
from optstream.units import PAGE_BYTES


def spec(
    name: str,
    shape: tuple[int, ...],
    *,
    keys: Sequence[str] = ("exp_avg", "exp_avg_sq"),
    dtype: torch.dtype = torch.float32,
    elementwise: bool = True,
    device: str = "cpu",
    temporaries: Temporaries = Temporaries.ONE,
    temporary_bytes: int = 0,
) -> ParamSpec:
    stride = torch.empty(shape, device="meta").stride()
    states = tuple(StateTensor(key, shape, stride, dtype) for key in keys)
    return ParamSpec(
        name=name,
        group=0,
        position=0,
        shape=shape,
        dtype=torch.bfloat16 if MASTER in keys else dtype,
        device=device,
        states=states,
        elementwise=elementwise,
        temporaries=temporaries,
        temporary_bytes=temporary_bytes,
    )


def random_specs(seed: int) -> list[ParamSpec]:
    rng = random.Random(seed)
    keys = ((MASTER, "exp_avg"), ("exp_avg", "exp_avg_sq"), ("momentum_buffer",), (MASTER,), ())
    return [
        spec(
            f"p{index}",
            rng.choice([(), (0,), (rng.randrange(1, 99),), (rng.randrange(1, 400), 211), (3, 0)]),
            keys=rng.choice(keys),
            dtype=rng.choice([torch.float32, torch.float64, torch.complex128, torch.uint8]),
            elementwise=rng.random() < 0.7,
        )
        for index in range(30)
    ]


@pytest.mark.parametrize("window_bytes", [MIN_WINDOW_BYTES, 100_000, 2**20, 2**30])
@pytest.mark.parametrize("seed", range(10))
def test_windows_hold_every_element_once(seed: int, window_bytes: int) -> None:
    specs = random_specs(seed)
    plan = Plan(window_bytes).extended(specs[:20]).extended(specs[20:])
    for index, param in enumerate(specs):
        pieces = [p for window in plan.windows for p in window.pieces if p.param == index]
        assert pieces[0].start == 0
        assert pieces[-1].stop == param.numel
        assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
        assert all(piece.start % SLICE_ALIGNMENT == 0 for piece in pieces)
        assert all(piece.whole is not param.elementwise for piece in pieces)
        if not param.elementwise:
            assert len(pieces) == 1
        for piece in pieces:
            assert [extent.key for extent in piece.extents] == [state.key for state in param.states]
            for extent in piece.extents:
                assert extent.num_bytes == piece.numel * extent.dtype.itemsize


@pytest.mark.parametrize("window_bytes", [MIN_WINDOW_BYTES, 100_000, 2**20])
@pytest.mark.parametrize("seed", range(10))
def test_extents_are_aligned_and_apart(seed: int, window_bytes: int) -> None:
    plan = Plan(window_bytes).extended(random_specs(seed))
    for window in plan.windows:
        assert window.data_bytes % PAGE_BYTES == 0
        end = 0
        for extent in (extent for piece in window.pieces for extent in piece.extents):
            assert extent.offset % EXTENT_ALIGNMENT == 0
            assert extent.offset >= end
            end = extent.offset + extent.num_bytes
        assert end <= window.data_bytes < end + PAGE_BYTES
    assert plan.state_bytes == sum(spec.state_bytes for spec in plan.params)


def test_slices_obey_the_window() -> None:
    plan = Plan(2**20).extended([spec("a", (1000,)), spec("embedding", (5000, 1001))])
    assert all(window.data_bytes <= 2**20 for window in plan.windows)
    assert plan.num_windows <= plan.state_bytes / 2**20 * 1.1 + 1


def test_whole_parameters_share_a_window_while_they_fit() -> None:
    plan = Plan(2**20).extended([spec(f"m{i}", (64, 1024), elementwise=False) for i in range(6)])
    assert [len(window.pieces) for window in plan.windows] == [2, 2, 2]


def test_one_window_has_one_device() -> None:
    specs = [spec("a", (3,)), spec("b", (3,), device="cuda:0"), spec("c", (3,), device="cuda:1")]
    plan = Plan(2**20).extended(specs)
    assert [window.device for window in plan.windows] == ["cpu", "cuda:0", "cuda:1"]


def test_a_large_matrix_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "optstream"):
        plan = Plan(MIN_WINDOW_BYTES).extended(
            [spec("small", (8, 8), elementwise=False)]
            + [spec(f"h.{i}.mlp", (256, 256 + i), elementwise=False) for i in range(3)]
        )
    assert plan.slot_bytes > MIN_WINDOW_BYTES
    (record,) = caplog.records
    text = record.getMessage()
    assert "3 of the windows exceed window=64.0 KiB" in text
    assert "largest is 516.0 KiB (h.2.mlp)" in text


@pytest.mark.parametrize("size", [0, 1, MIN_WINDOW_BYTES - 1])
def test_a_window_too_small_is_refused(size: int) -> None:
    with pytest.raises(optstream.OffloadError, match=f"window={size} bytes is too small"):
        parse_window_bytes(size)


def test_the_peak_is_slots_and_one_update() -> None:
    plain = spec("a", (2**18, 10))
    plan = Plan(2**20).extended([plain])
    fixed = plan.bookkeeping_bytes + OVERHEAD_BYTES
    assert plan.peak_host_bytes == NUM_SLOTS * plan.slot_bytes + fixed

    loop = spec("a", (2**18,), temporaries=Temporaries.ONE, temporary_bytes=4 * 2**18)
    plan = Plan(2**20).extended([loop] * 4)
    assert plan.update_bytes == 2**19  # one slice: a window has half of a parameter
    batched = spec("a", (2**16,), temporaries=Temporaries.BATCHED, temporary_bytes=2**18)
    plan = Plan(2**22).extended([batched] * 4)
    assert plan.num_windows == 1
    assert plan.update_bytes == 4 * 2**18

    masters = spec("a", (2**18, 10), keys=(MASTER, "exp_avg"))
    plan = Plan(2**20).extended([masters])
    assert plan.gradient_bytes == 4 * 2**17
    buffers = NUM_SLOTS * plan.slot_bytes + plan.gradient_bytes
    assert plan.peak_host_bytes == buffers + plan.bookkeeping_bytes + OVERHEAD_BYTES


def test_matrices_of_several_ranks_have_the_same_windows_on_all() -> None:
    """Also on ranks that have less of them, or nothing; what is a rank's own comes after them."""
    shapes = [(9, 1024), *[(1, 1024)] * 20, (7, 1024), (40, 1024), (3, 1024)]
    plans = []
    for rank in range(4):
        specs = [spec("own", (1000 * (rank + 1),))]
        for rows, cols in shapes:
            largest = -(-rows // 4)
            part = max(0, min(largest, rows - largest * rank)), cols
            gathered = Gathered(4, largest * cols)
            specs.append(replace(spec(f"{rows}", part, elementwise=False), gathered=gathered))
        plans.append(Plan(2**16).extended(specs))
    windows = [[w for w in plan.windows if w.gathered] for plan in plans]
    members = [[[piece.param for piece in w.pieces] for w in each] for each in windows]
    assert members == [members[0]] * 4
    assert len(members[0]) > 2
    for plan, each in zip(plans, windows, strict=True):
        assert list(plan.windows[: len(each)]) == each
        assert all(window.data_bytes > 0 for window in each)
        assert plan.peak_host_bytes > plan.num_slots * plan.slot_bytes + 3 * 40 * 1024 * 4


def test_the_peak_does_not_depend_on_the_size_of_the_model() -> None:
    plans = [Plan(2**20).extended([spec("a", (2**18, n))] * 3) for n in (2, 40)]
    peaks = [plan.peak_host_bytes - plan.bookkeeping_bytes for plan in plans]
    assert peaks[0] == peaks[1]


def test_bookkeeping_is_little_beside_the_state() -> None:
    layers = [spec(f"h.{n}", (4096, 4096)) for n in range(400)]
    plan = Plan(256 * 2**20).extended(layers)
    assert plan.bookkeeping_bytes < plan.state_bytes / 5000
    assert plan.bookkeeping_bytes < NUM_SLOTS * plan.slot_bytes / 100
    small = Plan(2**20).extended([spec(f"h.{n}", (64,)) for n in range(20000)])
    assert small.bookkeeping_bytes > 10 * small.state_bytes


def test_small_parameters_make_their_state_together() -> None:
    first = replace(spec("a", (2**10,)), first_bytes=2**13)
    assert Plan(2**22).extended([first] * 4).update_bytes == 2**15
    assert Plan(2**22).extended([first] * 200).update_bytes == FIRST_RUN_BYTES


@pytest.mark.parametrize("ram", [0, "30%", "80%"])
@pytest.mark.parametrize("num_windows", [1, 2, 4, 5, 7, 8, 13])
def test_the_bytes_of_a_step_are_what_reports_count(
    num_windows: int, ram: int | str, tmp_path: Path
) -> None:
    # two slices a window and a remainder, so that windows are not all alike
    params = [nn.Parameter(torch.ones(4096 * 2 * num_windows - 1000))]
    inner = torch.optim.AdamW(params)
    with optstream.offload(inner, tmp_path, window="64KiB", ram=ram) as optimizer:
        plan = optimizer.plan
        assert plan.num_windows == num_windows

        def steps(count: int) -> tuple[int, int]:
            read = written = 0
            for _ in range(count):
                params[0].grad = torch.ones_like(params[0])
                optimizer.step()
                assert optimizer.report is not None
                read += optimizer.report.read_bytes
                written += optimizer.report.written_bytes
            params[0].grad = None
            deadline = time.monotonic() + 10
            while written < count * plan.written_bytes_per_step and time.monotonic() < deadline:
                optimizer.step()  # without gradients: only its report is of interest
                written += optimizer.report.written_bytes
            return read, written

        assert steps(2)[1] == 2 * (plan.data_bytes - plan.resident_bytes)
        read, written = steps(4)
    assert read == 4 * plan.read_bytes_per_step
    assert written == 4 * plan.written_bytes_per_step
