"""The optimizer's side of a step: state in memory, or streamed from a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import optstream
from optstream.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What the optimizer moved and how long the step waited for it; zero in memory."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0


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

    def step(self) -> StepCost:
        """Update every parameter that has a gradient."""
        ...

    def state_bytes(self) -> int:
        """Return the bytes of the state, masters included; in memory, known after a step."""
        ...

    def close(self) -> None:
        """Give the state up; nothing of it is left on a drive."""
        ...


class InMemory:
    """The plain optimizer; the textbook loop with float32 masters for narrower parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.plan = None
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._master(param) for param in group["params"]]

    @torch.no_grad()
    def step(self) -> StepCost:
        for param, master in self._masters:
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in self._masters:
            param.copy_(master)
            master.grad = None
        return StepCost()

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        values = [value for state in states for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        tensors += [master for _, master in self._masters]
        return sum(tensor.nbytes for tensor in tensors)

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
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        *,
        store: str,
        directory: Path,
        window_bytes: int,
    ) -> None:
        self.optimizer = optstream.offload(
            optimizer, directory, model=module, window=window_bytes, store=store
        )
        self.plan = self.optimizer.plan

    def step(self) -> StepCost:
        self.optimizer.step()
        report = self.optimizer.report
        assert report is not None, "a step makes a report"
        return StepCost(
            read_bytes=report.read_bytes,
            written_bytes=report.written_bytes,
            read_wait_s=report.read_wait_s,
            write_wait_s=report.write_wait_s,
        )

    def state_bytes(self) -> int:
        return self.plan.state_bytes

    def close(self) -> None:
        self.optimizer.close()


def make_updater(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, config: TrainConfig
) -> Updater:
    """Keep the optimizer's state where the configuration says."""
    if config.store == "none":
        return InMemory(optimizer)
    return Streamed(
        optimizer,
        module,
        store=config.store,
        directory=config.state_dir or Path(),
        window_bytes=config.window_bytes,
    )
