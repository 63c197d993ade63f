"""A step interrupted at every one of its lines: what comes next runs, and everything ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import optstream

PACKAGE = str(Path(optstream.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of optstream that the calling thread runs."""

    def __init__(self, at_line: int) -> None:
        self.lines_left = at_line
        self.where = ""

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines_left -= event == "line"
        if self.lines_left == 0 and not self.where:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.line


@contextmanager
def interrupted(at_line: int) -> Iterator[Interrupt]:
    interrupt = Interrupt(at_line)
    sys.settrace(interrupt.call)
    try:
        yield interrupt
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("store", ["direct", "mapped"])
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_what_follows_an_interrupt_runs(
    stride: int, store: str, directory: Path, tmp_path: Path
) -> None:
    """Step, look, save, and close at the end; `directory` sees that nothing is left."""
    params = [nn.Parameter(torch.randn(100, 200)) for _ in range(6)]
    for param in params:
        param.grad = torch.randn_like(param)
    inner = torch.optim.AdamW(params, lr=1e-3, fused=True)
    at_line, where = 0, "the start"
    with optstream.offload(inner, directory, window="192KiB", io_threads=2, store=store) as wrapped:
        optimizer: Any = wrapped
        while where:
            at_line += stride
            with interrupted(at_line) as interrupt:
                optimizer.step()
            where = interrupt.where
            optimizer.step()
            assert [bool(optimizer.state[param]["exp_avg"].any()) for param in params], where
            if at_line % (10 * stride) == 0:
                optimizer.save(tmp_path / "checkpoint")
    assert at_line > 1000
