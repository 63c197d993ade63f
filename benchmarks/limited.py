"""One training in a process of its own, whose memory can be limited while it waits.

The parent starts it, sets a limit, and asks for steps one by one, so that several take turns:

    Contestant            lines of JSON            this file as a program
    start                 ────────────►            join the cgroup, make the model, tell its memory
    limit                 ────────────►            (cgroup: the parent sets it) ulimit -d
    step ...              ────────────►            gradients, update; tell seconds, loss, memory
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from memory_group import MemoryGroup

_SAMPLE_S = 0.002


def state_bytes(width: int) -> int:
    """Return the bytes of AdamW's state for one layer."""
    return 8 * (width * width + width)


class DiedError(Exception):
    """The process ended.

    Attributes:
        status: of its exit, negative for a signal.
        message: the last line it wrote to standard error.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"exit {status}: {message}")


class Contestant:
    """A training process, as the parent sees it.

    Attributes:
        started: its memory with model, gradients and one pass through both.
    """

    def __init__(
        self, kind: str, directory: Path, group: MemoryGroup | None = None, **options: Any
    ) -> None:
        """Start it.

        Args:
            kind: "plain" (torch's optimizer in memory), "forward" (mapped, never backwards), or a
                store.
            options: num_layers and their width, threads, train (whether gradients are computed and
                memory is sampled all the time), and those of offload.
        """
        options |= {"kind": kind, "directory": str(directory)}
        options["procs"] = None if group is None else str(group.procs)
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.group = group
        self.started = self._answer()

    def limit(self, left_bytes: int, *, by_cgroup: bool) -> None:
        """Leave it so many bytes more than it uses now."""
        if by_cgroup:
            assert self.group is not None
            use = self.group.read()
            used_bytes = (use.used_bytes or 0) - (use.file_bytes or 0)
            self.group.limit(used_bytes + left_bytes)
        else:
            self._ask(limit=left_bytes)

    def step(self) -> dict[str, Any]:
        return self._ask(step=True)

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.group is not None:
            self.group.remove()

    def _ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._process.stderr.read().strip().splitlines()
            raise DiedError(self._process.wait(), lines[-1] if lines else "")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Peak:
    """The most anonymous memory since the last question, if it is sampled; else what it is now."""

    def __init__(self, sampled: bool) -> None:
        self._peak = 0
        if sampled:  # a thread that would take time from a step
            threading.Thread(target=self._sample, daemon=True).start()

    def take(self) -> int:
        peak, self._peak = max(self._peak, read_status("RssAnon")), 0
        return peak

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, read_status("RssAnon"))
            time.sleep(_SAMPLE_S)


def read_status(field: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


class Training:
    """A chain of layers that learns to repeat a fixed batch."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        warm_up()
        torch.set_num_threads(options.pop("threads", 1))
        torch.manual_seed(0)
        num_layers, width = options.pop("num_layers"), options.pop("width")
        self._train = options.pop("train")
        self._forward_only = options["kind"] == "forward"
        self._layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_layers))
        self._inputs, self._targets = torch.randn(2, 8, width)
        self._shared = torch.full((width * width,), 1e-3)
        self.loss = self.gradients()
        self._options = options
        self.optimizer: Any = None

    def gradients(self) -> float:
        """Leave gradients in the parameters; return the loss."""
        if not self._train:
            for param in self._layers.parameters():
                param.grad = self._shared[: param.numel()].view_as(param)
            return 0.0
        self._layers.zero_grad(set_to_none=False)
        hidden = self._inputs
        for layer in self._layers:
            hidden = hidden + layer(hidden.tanh()) / len(self._layers)
        loss = (hidden - self._targets).square().mean()
        loss.backward()
        return loss.item()

    def wrap(self) -> None:
        """Make the optimizer; in a store its state is there from now on."""
        import torch

        import optstream

        options = dict(self._options)
        kind, directory = options.pop("kind"), options.pop("directory")
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self._layers.parameters(), fused=True)
        if kind != "plain":
            store = "mapped" if kind == "forward" else kind
            optimizer = optstream.offload(optimizer, directory, store=store, **options)
        self.optimizer = optimizer

    def step(self) -> dict[str, Any]:
        if self.optimizer is None:
            self.wrap()
        loss = self.gradients()
        start = time.perf_counter()
        self.optimizer.step()
        state = getattr(self.optimizer, "_state", None)
        if state is not None:
            state.stream.drain()
        seconds = time.perf_counter() - start
        if self._forward_only:
            state.progress.backwards = False
            state.stream._mover.look_ahead(range(state.plan.num_windows))
        bound = None if state is None else state.plan.peak_host_bytes
        report = None if state is None else vars(self.optimizer.report)
        return {"loss": loss, "seconds": seconds, "bound_bytes": bound, "report": report}


def warm_up() -> None:
    """Load what any step loads: that is not the state's to count."""
    import torch

    import optstream

    for wrapped in (False, True):
        params = [torch.nn.Parameter(torch.ones(64, 64))]
        params[0].grad = torch.ones(64, 64)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, fused=True)
        if wrapped:
            optimizer = optstream.offload(optimizer, "/", store="memory")
        optimizer.step()


def main() -> None:
    options = json.loads(sys.argv[1])
    procs = options.pop("procs")
    if procs is not None:
        Path(procs).write_text("0")
    peak = Peak(sampled=options["train"])
    training = Training(options)
    training.gradients()
    print(json.dumps({"anon_bytes": peak.take()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        if "limit" in asked:
            limit_bytes = read_status("VmData") + asked["limit"]
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        else:
            answer = {**training.step(), "peak_anon_bytes": peak.take()}
        print(json.dumps(answer), flush=True)
    if hasattr(training.optimizer, "close"):
        training.optimizer.close()


if __name__ == "__main__":
    main()
