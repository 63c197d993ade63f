"""A small transformer under fully_shard, its matrices updated by Muon with state on the drive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import optstream

Ranks = Callable[..., list[Any]]
STEPS = 3
NUM_SEQUENCES = 4
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of K's would be noise
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, 3, bias=False)  # fewer rows than ranks
        self.wide = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(found.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x))) + self.wide(self.narrow(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.lm_head = nn.Linear(WIDTH, 101)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(mesh_shape: tuple[int, ...]) -> Model:
    torch.manual_seed(0)
    model = Model()
    if mesh_shape:
        names = ("copies", "shards")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def muon(model: nn.Module) -> optstream.Muon:
    return optstream.Muon(optstream.muon_groups(model, lr=0.02, adamw_lr=1e-3, weight_decay=0.1))


def train(model: nn.Module, optimizer: Any) -> None:
    """Take steps on this rank's share of the sequences."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = NUM_SEQUENCES // size
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(101, (NUM_SEQUENCES, 24), generator=generator)
        model.zero_grad()
        model(tokens[rank * share : (rank + 1) * share]).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in model.named_parameters()
    }


def plain_and_streamed(directory: Path, mesh_shape: tuple[int, ...]) -> Any:
    plain, model = make_model(mesh_shape), make_model(mesh_shape)
    train(plain, muon(plain))
    expected = weights(plain)
    with optstream.offload(
        muon(model), directory, model=model, window="64KiB", process_group=dist.group.WORLD
    ) as optimizer:
        train(model, optimizer)
        found = weights(model)
        windows = optimizer.report.num_windows, optimizer.report.read_bytes
        clipped = clip(model, optimizer, plain)
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    return found, differing, windows, clipped


def clip(model: nn.Module, optimizer: optstream.StreamedOptimizer, plain: nn.Module) -> bool:
    """Tell whether the norm of the last gradients is torch's."""
    optstream.reduce_to_owner(optimizer)  # shards are averaged already
    norm = optstream.clip_grad_norm_(optimizer, 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    return torch.allclose(norm, wanted.full_tensor(), rtol=1e-5)  # type: ignore[attr-defined]


def one_process() -> dict[str, Tensor]:
    model = make_model(())
    train(model, muon(model))
    return weights(model)


@pytest.mark.parametrize(
    "mesh_shape",
    [
        pytest.param((2,), id="2"),
        pytest.param((4,), id="4", marks=pytest.mark.slow),
        pytest.param((2, 2), id="hsdp"),
    ],
)
def test_a_transformer(ranks: Ranks, tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    [expected] = ranks(1, one_process)
    size = torch.Size(mesh_shape).numel()
    for found, differing, (num_windows, read_bytes), clipped in ranks(
        size, plain_and_streamed, tmp_path, mesh_shape
    ):
        assert differing == [], "streamed and plain"
        assert num_windows > 4
        assert read_bytes > 0
        assert clipped
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-3, atol=2e-5), name


class Tensorwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 44, bias=False)
        self.down = nn.Linear(44, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()  # type: ignore[no-any-return]


def make_tensor_parallel() -> Tensorwise:
    torch.manual_seed(0)
    model = Tensorwise()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh["data"])  # type: ignore[return-value]


def tensor_parallel(directory: Path) -> list[str]:
    """Return where tensor parallelism under fully_shard differs from one process."""
    whole = Tensorwise()
    torch.manual_seed(0)
    whole.__init__()  # type: ignore[misc]
    plain, model = make_tensor_parallel(), make_tensor_parallel()
    wrong = []
    options = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = [optstream.Muon(m.parameters(), **options) for m in (whole, plain, model)]
    optimizers[2] = optstream.offload(  # type: ignore[call-overload]
        optimizers[2], directory, model=model, window="64KiB", process_group=dist.group.WORLD
    )
    for step in range(STEPS):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((whole, plain, model), optimizers, strict=True):
            each.zero_grad()
            each(x).backward()
            optimizer.step()
    for name, value in weights(whole).items():
        a, b = weights(plain)[name], weights(model)[name]
        if not torch.equal(a, b):
            wrong.append(f"{name}: streamed and plain")
        if not torch.allclose(a, value, rtol=1e-3, atol=2e-5):
            wrong.append(f"{name}: {(a - value).abs().max()} from one process")
    placements = {str(type(p).__name__) for q in model.parameters() for p in q.placements}
    return wrong if "_StridedShard" in placements else [f"only {placements}"]


def test_tensor_parallel_under_fully_shard(ranks: Ranks, tmp_path: Path) -> None:
    for wrong in ranks(4, tensor_parallel, tmp_path):
        assert wrong == []
