"""How a window gets from its host buffer to where the update runs, and back.

What differs between a CPU and an accelerator is this one class. The waits it offers are all there
are: the parity tests run with a lane that copies late, on another thread, and fills buffers with
NaN until it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

Wait = Callable[[], None]


class Lane(ABC):
    """Copies windows of one device; the thread that steps calls load, wait_loaded, unload."""

    @abstractmethod
    def load(self, host: Tensor) -> Tensor:
        """Start copying a window to the device; return where it will be (uint8, like `host`)."""

    @abstractmethod
    def wait_loaded(self) -> None:
        """Order all work of the caller from now on behind the last `load`."""

    @abstractmethod
    def unload(self, host: Tensor) -> Wait:
        """Start copying the last loaded window back, behind the caller's work on it.

        Returns:
            A function that blocks until `host` holds the bytes; any thread may call it, repeatedly.
        """

    def pin(self, host: Tensor) -> Wait:
        """Make a host buffer fit for fast copies; the returned function undoes it."""
        return nothing


class CpuLane(Lane):
    """The host buffer is where the update runs."""

    def load(self, host: Tensor) -> Tensor:
        return host

    def wait_loaded(self) -> None:
        return None

    def unload(self, host: Tensor) -> Wait:
        return nothing


class CudaLane(Lane):
    """Two device buffers: one is updated while the other is copied out and refilled."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._unloaded = [torch.cuda.Event() for _ in self._buffers]
        self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))
        self._loaded = torch.cuda.Event()
        self._turn = 0

    def load(self, host: Tensor) -> Tensor:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn][: host.numel()]
        self._in.wait_event(self._unloaded[self._turn])
        with torch.cuda.stream(self._in):
            buffer.copy_(host, non_blocking=True)
            self._loaded.record(self._in)
        return buffer

    def wait_loaded(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded)

    def unload(self, host: Tensor) -> Wait:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(self._buffers[self._turn][: host.numel()], non_blocking=True)
            # an event of its own: a waiter in another thread must not see the next round's record
            done = torch.cuda.Event()
            done.record(self._out)
        self._unloaded[self._turn] = done
        return done.synchronize

    def pin(self, host: Tensor) -> Wait:
        # registering our own mapping keeps its size; pin_memory=True may round up to a power of two
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))

        def unpin() -> None:
            torch.cuda.synchronize(self._device)
            torch.cuda.check_error(runtime.cudaHostUnregister(host.data_ptr()))

        return unpin


def make_lane(device: torch.device, num_bytes: int) -> Lane:
    """Return the lane for a device; `num_bytes` is the size of the largest window."""
    if device.type == "cuda":
        return CudaLane(device, num_bytes)
    return CpuLane()


def nothing() -> None:
    """Wait for nothing."""
