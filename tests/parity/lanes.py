"""A lane that does what an accelerator's does, late: a missing wait shows as NaN.

Its "device" is a second pair of buffers in host memory. Copies run in order on threads of their
own, one inwards and one outwards, as on two device streams; until a copy is through its target is
filled with 0xFF, which every floating dtype reads as NaN.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from optstream.stream import lane as lanes

IN_S, OUT_S = 0.001, 0.005
"""Outward copies take longer, so that who does not wait for one is sure to be earlier."""

NAN_BYTE = 0xFF


class DeferredLane(lanes.Lane):
    """Two device buffers, like CudaLane; `wait_loaded` and the returned waits block."""

    out_s = OUT_S

    def __init__(self, num_bytes: int) -> None:
        self._buffers = [torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8) for _ in range(2)]
        self._unloaded: list[Future[None]] = [Future(), Future()]
        for future in self._unloaded:
            future.set_result(None)
        self._in, self._out = (ThreadPoolExecutor(1, "deferred-lane") for _ in range(2))
        self._loaded: Future[None] = Future()
        self._turn = 0

    def load(self, host: Tensor) -> Tensor:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn][: host.numel()]
        self._wait_reusable(self._turn)
        buffer.fill_(NAN_BYTE)
        self._loaded = self._in.submit(_copy_late, IN_S, buffer, host)
        return buffer

    def _wait_reusable(self, turn: int) -> None:
        self._unloaded[turn].result()

    def wait_loaded(self) -> None:
        self._loaded.result()

    def unload(self, host: Tensor) -> lanes.Wait:
        buffer = self._buffers[self._turn][: host.numel()]
        host.fill_(NAN_BYTE)
        unloaded = self._out.submit(_copy_late, self.out_s, host, buffer)
        self._unloaded[self._turn] = unloaded
        return lambda: unloaded.result()

    def close(self) -> None:
        for pool in (self._in, self._out):
            pool.shutdown(wait=True)


class WithoutLoadWait(DeferredLane):
    def wait_loaded(self) -> None:
        return None


class WithoutUnloadWait(DeferredLane):
    out_s = 4 * OUT_S  # so late that it is seen on a busy machine, too

    def unload(self, host: Tensor) -> lanes.Wait:
        super().unload(host)
        return lanes.nothing


class WithoutReuseWait(DeferredLane):
    def _wait_reusable(self, turn: int) -> None:
        return None


def _copy_late(delay_s: float, target: Tensor, source: Tensor) -> None:
    time.sleep(delay_s)
    target.copy_(source)


@contextmanager
def installed(kind: type[DeferredLane], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let every stream use this lane; the list gets a name for each lane that was made."""
    made: list[DeferredLane] = []
    names: list[str] = []
    lock = threading.Lock()

    def make_lane(device: torch.device, num_bytes: int) -> DeferredLane:
        with lock:
            made.append(kind(num_bytes))
            names.append(f"{kind.__name__} for {device}")
        return made[-1]

    monkeypatch.setattr(lanes, "make_lane", make_lane)
    try:
        yield names
    finally:
        for lane in made:
            lane.close()
