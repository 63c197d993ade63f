"""torch.distributed.checkpoint, and what frameworks do with state_dict() and `.state`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import optstream
from checkpoint.runs import (
    after,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from optstream import OffloadError
from optstream.optimizer import StreamedOptimizer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(90, 130), nn.LayerNorm(130), nn.Linear(130, 40))


def wrapped(directory: Path, kind: Any = None) -> tuple[nn.Module, StreamedOptimizer]:
    model = net()
    make = kind or (lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False))
    optimizer = optstream.offload(make(model.parameters()), directory, model=model, window="64KiB")
    return model, optimizer


def params_of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_through_the_state_dict_helpers(how: str, flat: bool, world: None, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = wrapped(tmp_path / "a")
    with optimizer:
        go_on(params_of(model), optimizer, range(3))
        before = copied(optimizer.state_dict())
        given = get_optimizer_state_dict(model, optimizer, options=options)
        # getting it steps nothing
        assert_same_state(copied(optimizer.state_dict()), before)
        if how == "save":
            dcp.save({"optimizer": given}, checkpoint_id=tmp_path / "dcp")
        else:
            future = dcp.async_save({"optimizer": given}, checkpoint_id=tmp_path / "dcp")
            values = weights(params_of(model))
            go_on(params_of(model), optimizer, range(3, 5))  # while it is being written
            future.result()  # type: ignore[union-attr]
            set_weights(params_of(model), values)
        values = weights(params_of(model))
    resumed, optimizer = wrapped(tmp_path / "b")
    with optimizer:
        target = get_optimizer_state_dict(resumed, optimizer, options=options)
        dcp.load({"optimizer": target}, checkpoint_id=tmp_path / "dcp")
        set_optimizer_state_dict(resumed, optimizer, target, options=options)
        set_weights(params_of(resumed), values)
        assert_same_state(copied(optimizer.state_dict()), before)
        go_on(params_of(resumed), optimizer, range(3, 6))
    reference = net()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    go_on(params_of(reference), plain, range(6))
    assert_same_bits(weights(params_of(resumed)), weights(params_of(reference)))


def test_the_optimizer_itself_is_stateful(world: None, tmp_path: Path) -> None:
    """dcp.save and dcp.load take anything with state_dict and load_state_dict."""
    params, optimizer = streamed(tmp_path / "a")
    resumed, other = streamed(tmp_path / "b")
    with optimizer, other:
        go_on(params, optimizer, range(3))
        dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "dcp")
        go_on(resumed, other, range(1))
        set_weights(resumed, weights(params))
        dcp.load({"optimizer": other}, checkpoint_id=tmp_path / "dcp")
        assert_same_state(copied(other.state_dict()), copied(optimizer.state_dict()))
        go_on(resumed, other, range(3, 5))
    assert_same_bits(weights(resumed), after(5))


def test_getting_state_of_an_optimizer_without_any_steps_as_torch_does(
    world: None, tmp_path: Path
) -> None:
    """torch's helper makes state by a step with zero gradients; it must do that once, not again."""
    model, optimizer = wrapped(tmp_path)
    with optimizer:
        for _ in range(2):
            given = get_optimizer_state_dict(model, optimizer)
            assert {state["step"].item() for state in given["state"].values()} == {1.0}
        assert len(optimizer.state) == len(params_of(model))


# -- frameworks


def test_a_move_to_a_device_as_lightning_does_it(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path)
    with optimizer:
        go_on(params, optimizer, range(2))
        before = copied(optimizer.state_dict())
        reads = optimizer._state.stream.counters.read_bytes
        for param, state in optimizer.state.items():
            if not isinstance(state, dict):
                optimizer.state[param] = moved(state)  # type: ignore[index]
        assert optimizer._state.stream.counters.read_bytes == reads
        assert_same_state(copied(optimizer.state_dict()), before)
        with pytest.raises(OffloadError, match="cannot be assigned; use load_state_dict"):
            optimizer.state[params[0]] = {"step": 1}  # type: ignore[index]
        go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3))


def moved(data: Any) -> Any:
    """Move all tensors in a collection, as lightning's apply_to_collection does."""
    if isinstance(data, Tensor):
        pytest.fail("a state tensor was looked at")
    if isinstance(data, Mapping):
        return type(data)(OrderedDict((key, moved(value)) for key, value in data.items()))
    return data


def test_the_round_trip_of_accelerate(tmp_path: Path) -> None:
    """prepare() takes the state_dict and gives it back, before any step and after some."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    params, optimizer = streamed(tmp_path)
    with optimizer:
        accelerator.prepare(optimizer)
        assert not optimizer.state
        go_on(params, optimizer, range(2))
        before = copied(optimizer.state_dict())
        accelerator.prepare(optimizer)
        assert_same_state(copied(optimizer.state_dict()), before)
        go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3))
