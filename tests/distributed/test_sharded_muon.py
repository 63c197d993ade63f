"""Muon on DTensors: whole matrices are orthogonalised, with the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import optstream

Ranks = Callable[..., list[Any]]
STEPS = 3
Case = tuple[tuple[int, ...], dict[str, Any]]
CASES: list[Case] = [
    ((24, 16), {}),
    ((33, 20), {"weight_decay": 0.1}),
    ((5, 40), {"nesterov": False, "momentum_mode": "classical"}),
    ((1, 64), {"adjust_lr_fn": "match_rms_adamw"}),
    ((3, 7), {"maximize": True, "cautious_weight_decay": True, "weight_decay": 0.1}),
    ((130, 70), {"split": ("rows", (64, 33, 33)), "adjust_lr_fn": "spectral"}),
    ((66, 24), {"split": ("grouped", 3, (12, 5, 5)), "weight_decay": 0.1}),
    ((24, 66), {"split": ("grouped", 3, (12, 5, 5)), "transposed": True}),
    ((60, 20), {"split": ("equal", 4), "ns_dtype": "bfloat16"}),
    ((5, 12, 30), {"split": ("stack",)}),
    ((5, 12, 30), {"split": ("stack", ("equal", 3)), "transposed": True}),
    ((16, 3, 3, 2), {"split": ("flatten",)}),
    ((0, 12), {}),
]


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def make(dtype: torch.dtype, of: Callable[[Tensor], Tensor]) -> optstream.Muon:
    groups = [
        {"params": [nn.Parameter(of(values(shape, index, dtype)))], **options}
        for index, (shape, options) in enumerate(CASES)
    ]
    vectors = [nn.Parameter(of(values((n, 3), n, dtype))) for n in (7, 1)]
    return optstream.Muon([*groups, {"params": vectors, "use_muon": False}], lr=0.1)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(
    optimizer: torch.optim.Optimizer, step: int, of: Callable[[Tensor], Tensor]
) -> None:
    for index, param in enumerate(params_of(optimizer)):
        param.grad = of(values(tuple(param.shape), 100 * step + index + 50, param.dtype))


def take_steps(optimizer: torch.optim.Optimizer, of: Callable[[Tensor], Tensor]) -> None:
    for step in range(STEPS):
        give_gradients(optimizer, step, of)
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    """Tell whether bits are equal; torch's bfloat16 kernels round the end of a vector otherwise."""
    if left.dtype == torch.bfloat16:
        right = right.full_tensor()  # type: ignore[attr-defined]
        return torch.allclose(left, right, rtol=2**-7, atol=2**-7)
    return torch.equal(bits(left), bits(right))


def compare(mesh_shape: tuple[int, ...], placements: list[Any], dtype: torch.dtype) -> list[str]:
    mesh = init_device_mesh("cpu", mesh_shape)
    plain, sharded = make(dtype, Tensor.clone), make(dtype, lambda t: spread(t, mesh, placements))
    take_steps(plain, Tensor.clone)
    take_steps(sharded, lambda t: spread(t, mesh, placements))
    wrong = []
    for index, (a, b) in enumerate(zip(params_of(plain), params_of(sharded), strict=True)):
        if not same(a, b):
            wrong.append(f"parameter {index}: {(a - b.full_tensor()).abs().max()}")
        for key, value in plain.state[a].items():
            if not same(value, sharded.state[b][key]):
                wrong.append(f"{key} {index}")
    return wrong


def spread(tensor: Tensor, mesh: Any, placements: list[Any]) -> Tensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # all have it


MESHES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((1, 2), [Shard(1), Shard(0)]),
]


def all_meshes(size: int) -> list[str]:
    wrong = []
    for mesh_shape, placements in MESHES:
        if torch.Size(mesh_shape).numel() == size:
            for dtype in (torch.float32, torch.bfloat16):
                for each in compare(mesh_shape, placements, dtype):
                    wrong.append(f"{mesh_shape} {placements} {dtype} {each}")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_plain(ranks: Ranks, size: int) -> None:
    for wrong in ranks(size, all_meshes, size):
        assert wrong == [], "\n".join(wrong)


def make_many(dtype: torch.dtype, of: Callable[[Tensor], Tensor]) -> optstream.Muon:
    """Return an optimizer with more windows than slots."""
    groups = [
        {"params": [nn.Parameter(of(values(shape, index, dtype)))], **options}
        for index, (shape, options) in enumerate(CASES[1:10:2])
    ]
    optimizer = optstream.Muon(groups, lr=0.1)
    params = [nn.Parameter(of(values((96 + n % 2, 128), n, dtype))) for n in range(20)]
    optimizer.add_param_group({"params": params, "weight_decay": 0.1})
    return optimizer


def streamed(
    directory: Path,
    mesh_shape: tuple[int, ...],
    placements: list[Any],
    dtype: torch.dtype,
    **more: Any,
) -> list[str]:
    """Return where the streamed optimizer differs from the plain one on masters, in any bit."""
    mesh = init_device_mesh("cpu", mesh_shape)

    def of(tensor: Tensor) -> Tensor:
        return spread(tensor, mesh, placements)

    plain = make_many(torch.float32, lambda t: of(t.to(dtype).float()))
    with optstream.offload(
        make_many(dtype, of), directory, window="64KiB", process_group=dist.group.WORLD, **more
    ) as opt:
        for step in range(STEPS):
            give_gradients(plain, step, lambda t: of(t.to(dtype).float()))
            give_gradients(opt, step, of)
            plain.step()
            opt.step()
        pairs = zip(params_of(plain), params_of(opt), strict=True)
        wrong = [
            f"parameter {index}"
            for index, (a, b) in enumerate(pairs)
            if not torch.equal(bits(a.to(dtype)), bits(b))
        ]
        if opt.plan.num_windows < 5 or opt.report is None or not opt.report.read_bytes:
            wrong.append(f"does not stream: {opt.plan.num_windows} {opt.report}")
    return wrong


STREAMED: list[tuple[tuple[int, ...], list[Any], torch.dtype, str]] = [
    ((2,), [Shard(0)], torch.float32, "exact"),
    ((2,), [Shard(0)], torch.bfloat16, "split"),
    ((4,), [Shard(0)], torch.bfloat16, "exact"),
    ((2, 2), [Shard(0), Shard(1)], torch.float32, "exact"),
]


def streamed_meshes(directory: Path, size: int) -> list[str]:
    wrong = []
    for mesh_shape, placements, dtype, codec in STREAMED:
        if torch.Size(mesh_shape).numel() == size:
            for each in streamed(directory, mesh_shape, placements, dtype, codec=codec):
                wrong.append(f"{mesh_shape} {placements} {dtype} {codec} {each}")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_streamed(ranks: Ranks, tmp_path: Path, size: int) -> None:
    for wrong in ranks(size, streamed_meshes, tmp_path, size):
        assert wrong == [], "\n".join(wrong)
