"""What checkpoints cost a process, in memory and bytes, by the kernel's counters.

Run as a process: `python -m checkpoint.measured DIR STATE_BYTES`; prints JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import optstream

WINDOW_BYTES = 16 * 2**20


def read_counters(path: str) -> dict[str, int]:
    fields = [line.split() for line in Path(path).read_text().splitlines()]
    return {f[0].rstrip(":"): int(f[1]) for f in fields if len(f) > 1 and f[1].isdigit()}


def anon_bytes() -> int:
    return read_counters("/proc/self/status")["RssAnon"] * 1024


@contextmanager
def peak_of_anon_bytes() -> Iterator[list[int]]:
    """Give, at the end, how far anonymous memory rose above the start."""
    start, over = anon_bytes(), threading.Event()
    peak = [0]

    def sample() -> None:
        while not over.is_set():
            peak[0] = max(peak[0], anon_bytes() - start)
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


class Measured:
    """Runs calls and notes what each cost."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, int]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        before = read_counters("/proc/self/io")
        with peak_of_anon_bytes() as peak:
            result = call()
        after = read_counters("/proc/self/io")
        self.costs[name] = {key: after[key] - before[key] for key in after} | {"anon": peak[0]}
        return result


def make(state_bytes: int, directory: Path, share: int = 1) -> Any:
    """Return parameters and a streamed AdamW with so much state; a save writes 4 KiB a window."""
    window = max(WINDOW_BYTES, state_bytes // 64) // share
    count = state_bytes // 8 // 8
    params = [torch.nn.Parameter(torch.full((count,), 0.5)) for _ in range(8)]
    inner = torch.optim.AdamW(params, lr=1e-3, fused=True)
    return params, optstream.offload(inner, directory, window=window)


def step(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    for param in params:
        param.grad = torch.full_like(param, 1e-2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer._state.stream.drain()


def on_drive(tensor: torch.Tensor, directory: Path) -> torch.Tensor:
    """Return a tensor like it in a file without a name, as docs/checkpoints.md has it."""
    if tensor.dim() == 0:
        return tensor.clone()
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        flat = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return flat.view(tensor.shape)


def main(root: Path, state_bytes: int) -> None:
    logging.disable()
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dcp.save({"small": torch.zeros(1)}, checkpoint_id=root / "warm")
    measured = Measured()
    params, optimizer = make(state_bytes, root / "live")
    step(params, optimizer)
    step(params, optimizer)
    # torch imports and starts what it needs once
    torch.save(torch.zeros(1), root / "small.pt")
    torch.load(root / "small.pt", mmap=True)
    measured("save", lambda: optimizer.save(root / "checkpoint"))
    measured("step after", lambda: step(params, optimizer))
    given = measured("state_dict", optimizer.state_dict)
    expected = sum(float(s["exp_avg"][:3].sum()) for s in given["state"].values())
    measured("torch.save", lambda: torch.save(given, root / "state.pt"))
    step(params, optimizer)
    found = measured("torch.load", lambda: torch.load(root / "state.pt", mmap=True))
    assert expected == sum(float(s["exp_avg"][:3].sum()) for s in found["state"].values())
    measured("load_state_dict", lambda: optimizer.load_state_dict(found))
    found = None
    measured("dcp.save", lambda: dcp.save({"optimizer": given}, checkpoint_id=root / "dcp"))
    targets = {
        index: {key: on_drive(value, root) for key, value in state.items()}
        for index, state in given["state"].items()
    }
    loaded = {"optimizer": {**given, "state": targets}}
    given = None
    measured("dcp.load", lambda: dcp.load(loaded, checkpoint_id=root / "dcp"))
    measured("load_state_dict after it", lambda: optimizer.load_state_dict(loaded["optimizer"]))
    assert expected == sum(float(s["exp_avg"][:3].sum()) for s in targets.values())
    measured("load", lambda: optimizer.load(root / "checkpoint"))
    step(params, optimizer)
    optimizer.close()
    params, optimizer = make(state_bytes, root / "live", share=2)
    measured("load in other windows", lambda: optimizer.load(root / "checkpoint"))
    optimizer.close()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(measured.costs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
