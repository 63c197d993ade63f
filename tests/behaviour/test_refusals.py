"""What cannot work is refused when it is asked for, with the reason, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import optstream


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.optim.LBFGS(params()), "LBFGS .* closure several times a step"),
        (lambda: torch.optim.SparseAdam(params()), "SparseAdam .* sparse gradient"),
        (lambda: nn.Linear(2, 2), "needs a torch.optim.Optimizer, got Linear"),
        (lambda: params(), "needs a torch.optim.Optimizer, got list"),
    ],
    ids=["LBFGS", "SparseAdam", "module", "list"],
)
def test_optimizers(make: Callable[[], Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(optstream.OffloadError, match=why):
        optstream.offload(make(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_sparse_gradients(tmp_path: Path) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    with optstream.offload(torch.optim.SGD(embedding.parameters()), tmp_path) as optimizer:
        embedding(torch.tensor([1, 2])).sum().backward()
        before = embedding.weight.detach().clone()
        with pytest.raises(optstream.OffloadError, match=r"gradient .* is sparse"):
            optimizer.step()
        assert torch.equal(embedding.weight, before)


def test_sparse_parameters(tmp_path: Path) -> None:
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(optstream.OffloadError, match="layout"):
        optstream.offload(torch.optim.SGD([sparse]), tmp_path)


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_parameters_without_values(named: bool, frozen: bool, tmp_path: Path) -> None:
    model = meta_model().requires_grad_(not frozen)
    first = "0.weight" if named else "group0.param0"
    why = rf"parameter {first} and 3 more are on the meta device.*model\.to_empty"
    with pytest.raises(optstream.OffloadError, match=why):
        optstream.offload(
            torch.optim.AdamW(model.parameters()), tmp_path / "new", model=model if named else None
        )
    assert not list(tmp_path.iterdir())


def test_a_group_without_values(tmp_path: Path) -> None:
    given = params()
    with optstream.offload(torch.optim.AdamW(given), tmp_path) as optimizer:
        with pytest.raises(optstream.OffloadError, match=r"group1\.param0 is on the meta device"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.empty(3, device="meta"))]})
        assert len(optimizer.param_groups) == 1
        for param in given:
            param.grad = torch.ones_like(param)
        optimizer.step()


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"window": 0}, "window=0 bytes is too small"),
    ({"window": -1}, "window=-1 is negative"),
    ({"window": "-1MiB"}, "window='-1MiB' is not a size"),
    ({"window": "lots"}, "window='lots' is not a size"),
    ({"window": ""}, "window='' is not a size"),
    ({"window": "63KiB"}, "too small"),
    ({"window": 1e9}, "is not a size"),
    ({"window": None}, "is not a size"),
    ({"window": True}, "is not a size"),
    ({"io_threads": 0}, "io_threads=0"),
    ({"io_threads": -2}, "io_threads=-2"),
    ({"io_threads": "4"}, "io_threads='4'"),
    ({"io_threads": True}, "io_threads=True"),
    ({"ram": -1}, "ram=-1 is negative"),
    ({"ram": "1000TiB"}, "ram='1000TiB' is more than the"),
    ({"ram": "much"}, "ram='much' is not a size"),
    ({"store": "nvme"}, "store='nvme' is unknown"),
    ({"store": None}, "store=None is unknown"),
    ({"process_group": "everybody"}, "process_group"),
    ({"metrics": "/nonexistent/metrics.jsonl"}, "cannot write metrics to /nonexistent"),
]


@pytest.mark.parametrize(("options", "why"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_options(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(optstream.OffloadError, match=why):
        optstream.offload(torch.optim.SGD(params()), tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", [None, 5, b"bytes", [], "", [None], ["a", "a"]], ids=str)
def test_directories(directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(optstream.OffloadError, match="director"):
        optstream.offload(torch.optim.SGD(params()), directory)
    assert not list(tmp_path.iterdir())


def test_a_refused_wrap_leaves_no_metrics_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(optstream.OffloadError):
        optstream.offload(torch.optim.SGD(params()), tmp_path, store="nvme", metrics=metrics)
    assert not metrics.exists()


def test_wrapping_twice(tmp_path: Path) -> None:
    inner = torch.optim.AdamW(params())
    with optstream.offload(inner, tmp_path) as optimizer:
        for again in (inner, optimizer):
            with pytest.raises(optstream.OffloadError, match="offloaded already"):
                optstream.offload(again, tmp_path)
    optstream.offload(inner, tmp_path).close()


class Coupled(Optimizer):
    """Scales by the norm of all gradients."""

    def __init__(self, tensors: list[nn.Parameter]) -> None:
        super().__init__(tensors, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        group = self.param_groups[0]
        norm = sum(p.grad.square().sum() for p in group["params"] if p.grad is not None)
        for p in group["params"]:
            p.sub_(p.grad / norm)
        return None


def test_an_optimizer_with_a_global_norm(tmp_path: Path) -> None:
    with pytest.raises(optstream.OffloadError, match=r"depends on other parameters .*global norm"):
        optstream.offload(Coupled(params()), tmp_path)


class OwnAttribute(torch.optim.Optimizer):
    """Momentum in an attribute of its own, by parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.momentum.setdefault(param, torch.zeros_like(param))
                    param.sub_(kept.mul_(0.9).add_(param.grad), alpha=group["lr"])


def test_state_in_an_attribute_of_its_own(tmp_path: Path) -> None:
    optimizer = OwnAttribute([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(optstream.OffloadError, match=r"own attribute 'momentum'.*self\.state"):
        optstream.offload(optimizer, tmp_path)
    assert optimizer.momentum == {}
    assert list(tmp_path.iterdir()) == []
