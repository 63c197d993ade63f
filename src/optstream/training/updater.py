"""The optimizer's side of a step: state in memory, or streamed from a store."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

import optstream
from optstream.distributed.ranks import Ranks
from optstream.plan import MASTER
from optstream.training.config import TrainConfig
from optstream.training.ranks import process_group

Build = Callable[[], torch.optim.Optimizer]
"""Makes a new optimizer of the module's parameters."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What the optimizer moved and how long the step waited for drive and ranks; 0 in memory."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    exchange_wait_s: float = 0.0


class Updater(Protocol):
    """Updates a module's parameters from their gradients.

    Attributes:
        optimizer: what a learning-rate scheduler takes.
        plan: of the streamed state; None where the state is not streamed.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def plan(self) -> optstream.Plan | None: ...

    def clip_gradients(self, max_norm: float) -> float:
        """Average gradients over the ranks and clip them; return their norm before."""
        ...

    def step(self) -> StepCost:
        """Update every parameter that has a gradient."""
        ...

    def drain(self) -> StepCost:
        """Wait for the last writes; return what was moved, and waited for, since the last step."""
        ...

    def state_bytes(self) -> int:
        """Return the bytes of the state, masters included; in memory, known after a step."""
        ...

    def save(self, path: Path) -> None:
        """Make a checkpoint of the state, the same wherever the state lives."""
        ...

    def load(self, path: Path) -> None:
        """Take the state and the hyperparameters of a checkpoint.

        Raises:
            OffloadError: it is damaged, or does not fit.
        """
        ...

    def close(self) -> None:
        """Give the state up; nothing of it is left on a drive."""
        ...


class InMemory:
    """The plain optimizer; the textbook loop with float32 masters for narrower parameters."""

    def __init__(self, build: Build, module: torch.nn.Module, ranks: Ranks) -> None:
        self.optimizer = build()
        self._ranks = ranks
        self.plan = None
        self._build = build
        self._module = module
        self._params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in self.optimizer.param_groups:
            group["params"] = [self._master(param) for param in group["params"]]

    def clip_gradients(self, max_norm: float) -> float:
        params = [param for param in self._params if param.grad is not None]
        if self._ranks.size > 1:
            for param in params:
                assert param.grad is not None
                param.grad.mul_(1 / self._ranks.size)
                dist.all_reduce(param.grad)
        return torch.nn.utils.clip_grad_norm_(params, max_norm).item()

    @torch.no_grad()
    def step(self) -> StepCost:
        for param, master in self._masters:
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in self._masters:
            param.copy_(master)
            master.grad = None
        return StepCost()

    def drain(self) -> StepCost:
        return StepCost()

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        values = [value for state in states for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        tensors += [master for _, master in self._masters]
        return sum(tensor.nbytes for tensor in tensors)

    def save(self, path: Path) -> None:
        if self._ranks.rank > 0:  # all have all of it
            return
        state_dict = self.optimizer.state_dict()
        states = {index: dict(state) for index, state in state_dict["state"].items()}
        for index, master in self._numbered_masters():
            if index in states:
                states[index][MASTER] = master
        with self._streamed() as streamed:
            streamed.load_state_dict({**state_dict, "state": states})
            streamed.save(path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        with self._streamed() as streamed:
            streamed.load(path)
            state_dict = copy.deepcopy(streamed.state_dict())
        for index, master in self._numbered_masters():
            if index in state_dict["state"]:
                master.copy_(state_dict["state"][index].pop(MASTER))
        self.optimizer.load_state_dict(state_dict)

    def _streamed(self) -> optstream.StreamedOptimizer:
        """Return a streamed twin in memory, which reads and writes checkpoints."""
        return optstream.offload(self._build(), Path(), model=self._module, store="memory")

    def _numbered_masters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield masters with the index that a state_dict gives their parameter."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        indices = {id(param): index for index, param in enumerate(params)}
        return ((indices[id(master)], master) for _, master in self._masters)

    def close(self) -> None:
        self.optimizer.state.clear()
        self._masters.clear()

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype == torch.float32:
            return param
        master = param.detach().float()
        self._masters.append((param, master))
        return master


class Streamed:
    """The same optimizer with its state in a store."""

    def __init__(
        self,
        build: Build,
        module: torch.nn.Module,
        *,
        store: str,
        directory: Path,
        window_bytes: int,
        ram: int | str,
        ranks: Ranks,
        codec: str,
        seed: int,
    ) -> None:
        self.optimizer = optstream.offload(
            build(),
            directory,
            model=module,
            window=window_bytes,
            ram=ram,
            store=store,
            process_group=process_group(ranks),
            codec=codec,
            codec_seed=seed,
        )
        self.plan = self.optimizer.plan
        self._read_bytes = self._written_bytes = 0

    def clip_gradients(self, max_norm: float) -> float:
        optstream.reduce_to_owner(self.optimizer)
        return optstream.clip_grad_norm_(self.optimizer, max_norm).item()

    def step(self) -> StepCost:
        self.optimizer.step()
        report = self.optimizer.report
        assert report is not None, "a step makes a report"
        self._read_bytes += report.read_bytes
        self._written_bytes += report.written_bytes
        return StepCost(
            read_bytes=report.read_bytes,
            written_bytes=report.written_bytes,
            read_wait_s=report.read_wait_s,
            write_wait_s=report.write_wait_s,
            exchange_wait_s=report.exchange_wait_s,
        )

    def drain(self) -> StepCost:
        stream = self.optimizer._state.stream
        start = time.perf_counter()
        stream.drain()
        return StepCost(
            read_bytes=stream.counters.read_bytes - self._read_bytes,
            written_bytes=stream.counters.written_bytes - self._written_bytes,
            write_wait_s=time.perf_counter() - start,
        )

    def state_bytes(self) -> int:
        return self.plan.state_bytes

    def save(self, path: Path) -> None:
        self.optimizer.save(path)

    def load(self, path: Path) -> None:
        self.optimizer.load(path)

    def close(self) -> None:
        self.optimizer.close()


def make_updater(
    build: Build, module: torch.nn.Module, config: TrainConfig, ranks: Ranks
) -> Updater:
    """Keep the optimizer's state where the configuration says."""
    if config.store == "none":
        return InMemory(build, module, ranks)
    return Streamed(
        build,
        module,
        store=config.store,
        directory=config.state_dir or Path(),
        window_bytes=config.window_bytes,
        ram=config.ram,
        ranks=ranks,
        codec=config.codec,
        seed=config.seed,
    )
