"""Parameters that FSDP2 shards: the state of a shard is on the rank that has the shard."""

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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import optstream
from distributed.programs import adamw, differing, sgd

Ranks = Callable[..., list[Any]]
STEPS = 3
CASES = [
    ("adamw", torch.float32, False),
    ("adamw", torch.bfloat16, True),
    ("sgd", torch.float32, True),
    ("sgd", torch.bfloat16, False),
]
NORMS = [(2.0, False), (2.0, True), (3.0, True), (float("inf"), False)]
MAKES = {"adamw": adamw, "sgd": sgd}


class Net(nn.Module):
    """Rows that ranks share evenly, unevenly, and of which some get none; slices and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 65), nn.Linear(65, 5)])
        self.head = nn.Linear(5, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.embedding(tokens)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        return self.head(found).square().mean()  # type: ignore[no-any-return]


def make_model(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def sharded(dtype: torch.dtype, mesh_shape: tuple[int, ...]) -> Net:
    model = make_model(dtype)
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("copies", "shards")[-len(mesh_shape) :]
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    model.zero_grad()
    model(torch.randint(3000, (4, 32), generator=generator)).backward()


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parts as bytes."""
    return {
        name: param.detach().to_local().clone().view(-1).view(torch.uint8)  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    }


def plain_steps(make: Any, dtype: torch.dtype, mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the parts after steps of the plain optimizer on the same shards, with masters."""
    model = sharded(dtype, mesh_shape)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["params"] = [masters[param] for param in group["params"]]
    for step in range(STEPS):
        backward(model, step, dist.get_rank())
        with torch.no_grad():
            for param, master in masters.items():
                master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)
    return locals_of(model)


def steps_on_shards(
    make: Any, directory: Path, dtype: torch.dtype, mesh_shape: tuple[int, ...], **more: Any
) -> tuple[dict[str, Tensor], Any, Any]:
    model = sharded(dtype, mesh_shape)
    with optstream.offload(make(model), directory, model=model, window="64KiB", **more) as opt:
        for step in range(STEPS):
            backward(model, step, dist.get_rank())
            opt.step()
        return locals_of(model), opt.plan, opt.report


def equal_to_plain(directory: Path, mesh_shape: tuple[int, ...]) -> list[str]:
    """Return which cases differ from the plain optimizer, in any bit."""
    wrong = []
    for name, dtype, group in CASES:
        make = MAKES[name]
        wanted = plain_steps(make, dtype, mesh_shape)
        shared = dist.group.WORLD if group else None
        found, plan, report = steps_on_shards(
            make, directory, dtype, mesh_shape, process_group=shared
        )
        numel = sum(part.numel() for part in found.values()) // dtype.itemsize
        num_states = (2 if name == "adamw" else 1) + (dtype == torch.bfloat16)
        case = f"{name} {dtype} group: {group}"
        wrong += [f"{case} {key}" for key in differing(wanted, found)]
        if plan.state_bytes != numel * 4 * num_states:
            wrong.append(f"{case} keeps {plan.state_bytes} bytes of {numel} elements")
        if plan.num_windows < 2 or plan.num_resident or not report.written_bytes:
            wrong.append(f"{case} does not stream: {report}")
    return wrong


@pytest.mark.parametrize(
    "mesh_shape",
    [
        pytest.param((2,), id="2"),
        pytest.param((4,), id="4", marks=pytest.mark.slow),
        pytest.param((2, 2), id="hsdp"),
    ],
)
def test_equals_the_plain_optimizer(
    ranks: Ranks, tmp_path: Path, mesh_shape: tuple[int, ...]
) -> None:
    size = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    for wrong in ranks(size, equal_to_plain, tmp_path, mesh_shape):
        assert wrong == []


def one_process_or_shards(directory: Path) -> list[str]:
    """Return where norms and clipped gradients are not those of one process."""
    wrong = []
    rank, size = dist.get_rank(), dist.get_world_size()
    model, whole = sharded(torch.float32, (size,)), make_model()
    for norm_type, group in NORMS:
        backward(model, 0, rank)
        for param, full in zip(model.parameters(), whole.parameters(), strict=True):
            full.grad = param.grad.full_tensor()  # type: ignore[union-attr]
        grads = [param.grad for param in whole.parameters()]
        limit = 0.3 * float(torch.nn.utils.get_total_norm(grads, norm_type))
        shared = dist.group.WORLD if group else None
        with optstream.offload(adamw(model), directory, process_group=shared) as opt:
            found = optstream.clip_grad_norm_(opt, limit, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, norm_type)
        case = f"{norm_type} group: {group}"
        if not torch.allclose(found, wanted, rtol=1e-6, atol=0):
            wrong.append(f"norm {case}: {found} for {wanted}")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            if not torch.allclose(param.grad.full_tensor(), full.grad, rtol=1e-5, atol=1e-12):
                wrong.append(f"{name} clipped by norm {case}")
    return wrong


def test_the_norm_is_that_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    for size in (2, 4):
        for wrong in ranks(size, one_process_or_shards, tmp_path):
            assert wrong == []


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except optstream.OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(directory: Path) -> dict[str, str]:
    """Return what is said of each thing that shards cannot have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def offload(make: Any, *placements: Any) -> optstream.StreamedOptimizer:
        local = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
        model = nn.Module()
        model.weight = nn.Parameter(local)
        return optstream.offload(make(model), directory, model=model)

    def adafactor(model: nn.Module) -> Any:
        return torch.optim.Adafactor(model.parameters())

    def unknown(model: nn.Module) -> Any:
        return type("Mine", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)

    said = {
        "adafactor": message(lambda: offload(adafactor, Shard(0))),
        "unknown": message(lambda: offload(unknown, Shard(0))),
        "partial": message(lambda: offload(adamw, Partial())),
        "replicated": message(lambda: offload(adafactor, Replicate()).close()),
    }
    with offload(adamw, Shard(0)) as opt:
        param = opt.param_groups[0]["params"][0]
        said["norm"] = message(lambda: optstream.clip_grad_norm_(opt, 1.0, -1.0))
        param.grad = distribute_tensor(torch.ones(param.shape), mesh, [Replicate()])
        said["gradient"] = message(opt.step)
        said["clip"] = message(lambda: optstream.clip_grad_norm_(opt, 1.0))
    return said


def test_what_shards_cannot_have_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, refused, tmp_path):
        assert said.pop("replicated") == "no error"
        assert said.pop("norm").startswith("ConfigError: norm_type=-1.0 of sharded gradients")
        for case, text in said.items():
            assert "weight" in text, f"{case}: {text}"
        for case in ("adafactor", "unknown"):
            assert "needs whole parameters" in said[case]
        assert "redistribute()" in said["partial"]
        for case in ("gradient", "clip"):
            assert "param.grad.redistribute(placements=param.placements)" in said[case]


def swapped(directory: Path) -> bool:
    """Put other DTensors into the groups after wrapping, as frameworks do; do they move?"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    first = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    plain = torch.optim.AdamW([wanted])
    with optstream.offload(torch.optim.AdamW([first]), directory) as opt:
        second = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        opt.param_groups[0]["params"][0] = second
        for param in (wanted, second):
            param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
        plain.step()
        opt.step()
        moved = not bool(second.to_local().eq(1).any())
        return moved and torch.equal(second.to_local(), wanted.to_local())


def test_parameters_are_those_of_today(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, swapped, tmp_path) == [True, True]


def taken_over(directory: Path) -> list[bool]:
    """Go on where a plain optimizer has been."""
    found = {}
    for name in ("plain", "streamed"):
        model = sharded(torch.float32, (dist.get_world_size(),))
        opt = adamw(model)
        for step in range(STEPS):
            if name == "streamed" and step == 2:
                opt = optstream.offload(opt, directory, process_group=dist.group.WORLD)
            backward(model, step, dist.get_rank())
            opt.step()
        found[name] = locals_of(model)
        param = next(model.parameters())
        found[name + " state"] = opt.state[param]["exp_avg"]
    moments = found["plain state"].to_local(), found["streamed state"]
    same = [torch.equal(found["plain"][key], found["streamed"][key]) for key in found["plain"]]
    return [*same, torch.equal(*moments)]


def test_state_of_shards_is_taken_over(ranks: Ranks, tmp_path: Path) -> None:
    for same in ranks(2, taken_over, tmp_path):
        assert all(same)
