"""How a window gets from its host buffer to where the update runs, and back.

What differs between a CPU and an accelerator is this one class. The waits it offers are all there
are: the parity tests run with a lane that copies late, on another thread, and fills buffers with
NaN until it has.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from optstream.plan import NUM_DEVICE_BUFFERS
from optstream.units import format_bytes

Wait = Callable[[], None]

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the one that registers."""

log = logging.getLogger("optstream")


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

    def settle(self) -> None:  # noqa: B027 - most lanes have nothing under way
        """Block until no copy and no work on a buffer is under way."""

    def pin(self, host: Tensor) -> Wait:
        """Make a host buffer fit for fast copies, where that is possible.

        Returns:
            A function that undoes it, to be called while no copy is under way; `nothing` if there
            is nothing to undo.
        """
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
    """Two device buffers: one is updated while the other is copied out and refilled.

    Ordering, on the device; the host waits only where a wait is called:

        in stream    load k     ... load k+2, behind unload k
        current          update k, behind load k ...
        out stream                   unload k, behind update k ...
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for _ in range(NUM_DEVICE_BUFFERS)
        ]
        self._unloaded: list[torch.cuda.Event | None] = [None] * NUM_DEVICE_BUFFERS
        self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))
        self._loaded = torch.cuda.Event()
        self._turn = 0
        # the allocator hands out memory that work queued on the current stream may still use
        self._in.wait_stream(torch.cuda.current_stream(device))

    def load(self, host: Tensor) -> Tensor:
        self._turn = (self._turn + 1) % NUM_DEVICE_BUFFERS
        buffer = self._buffers[self._turn][: host.numel()]
        unloaded = self._unloaded[self._turn]
        if unloaded is not None:
            self._in.wait_event(unloaded)
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
            # an event of its own: a waiter in another thread must not see the next round's record;
            # blocking: waiters sleep, they do not spin
            done = torch.cuda.Event(blocking=True)
            done.record(self._out)
        self._unloaded[self._turn] = done
        return partial(_synchronize, self._device, done)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def pin(self, host: Tensor) -> Wait:
        # registering our own mapping keeps its size; pin_memory=True may round up to a power of two
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            result = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, _REGISTER_PORTABLE)
        try:
            torch.cuda.check_error(result)
        except RuntimeError as error:
            log.warning(
                "%s cannot be pinned (%s): copies to and from %s are slower",
                format_bytes(host.nbytes),
                error,
                self._device,
            )
            return nothing

        def unpin() -> None:
            torch.cuda.check_error(runtime.cudaHostUnregister(host.data_ptr()))

        return unpin


def _synchronize(device: torch.device, event: torch.cuda.Event) -> None:
    # a new thread is on device 0, where the call would make a context of some 500 MB
    with torch.cuda.device(device):
        event.synchronize()


def make_lane(device: torch.device, num_bytes: int) -> Lane:
    """Return the lane for a device; `num_bytes` is the size of the largest window."""
    if device.type == "cuda":
        return CudaLane(device, num_bytes)
    return CpuLane()


class Lanes:
    """The lanes of one stream by device, and what undoes the pinning of its host buffers."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._unpin: dict[int, Wait] = {}

    def get(self, device: torch.device, num_bytes: int, hosts: Iterable[Tensor]) -> Lane:
        """Return a device's lane, made when first asked for; then `hosts` are pinned for it.

        Args:
            num_bytes: size of the largest window.
        """
        if device not in self._lanes:
            lane = make_lane(device, num_bytes)
            for host in hosts:
                self._pin(lane, host)
            self._lanes[device] = lane
        return self._lanes[device]

    def settle(self) -> None:
        """Block until no copy and no work on a buffer is under way."""
        for lane in self._lanes.values():
            lane.settle()

    def drop(self) -> None:
        """Forget the lanes, with their device buffers; host buffers stay pinned."""
        self.settle()
        self._lanes = {}

    def unpin(self) -> None:
        """Undo all pinning; the host buffers may then be given back."""
        for unpin in self._unpin.values():
            unpin()
        self._unpin = {}

    def _pin(self, lane: Lane, host: Tensor) -> None:
        if host.nbytes and host.data_ptr() not in self._unpin:
            unpin = lane.pin(host)
            if unpin is not nothing:
                self._unpin[host.data_ptr()] = unpin


def nothing() -> None:
    """Wait for nothing."""
