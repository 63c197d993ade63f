"""What the tests' ranks have in common: a small model, its gradients, an optimizer, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream

WINDOW = "64KiB"


class Net(nn.Module):
    """Matrices that need whole windows and more, vectors, a convolution, one large embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(nn.Linear(64, width) for width in (96, 64, 160, 33))
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def set_gradients(params: Sequence[Tensor], step: int, rank: int = 0) -> None:
    """Give every parameter the same gradient on all ranks, unless they say who they are."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + 100_000 * rank + index)
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float32)
        param.grad = torch.empty_like(param).copy_(grad)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def muon(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.numel()]
    others = [p for p in model.parameters() if p.dim() != 2 or not p.numel()]
    return optstream.Muon(
        [{"params": matrices}, {"params": others, "use_muon": False, "lr": 1e-2}], lr=1e-2
    )


Make = Callable[[nn.Module], Optimizer]
MAKES: dict[str, Make] = {"adamw": adamw, "sgd": sgd, "muon": muon}


def offloaded(
    make: Make, model: nn.Module, directory: Path, **more: Any
) -> optstream.StreamedOptimizer:
    """Return the optimizer with its state shared by all ranks."""
    options = {"window": WINDOW, "process_group": dist.group.WORLD, **more}
    return optstream.offload(make(model), directory, model=model, **options)


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return the values of all parameters as bytes, which NaN compares in."""
    return {
        name: param.detach().clone().contiguous().view(-1).view(torch.uint8)
        for name, param in model.named_parameters()
    }


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters whose bits differ."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def plain_steps(make: Make, model: nn.Module, steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters after each step of the plain optimizer, with float32 masters."""
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["params"] = [masters[param] for param in group["params"]]
    for step in range(steps):
        set_gradients(list(model.parameters()), step)
        for param, master in masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)
        yield copies(model)
