"""The plain optimizer, with float32 masters where the parameters are narrower."""

from __future__ import annotations

from functools import partial

import torch

from optstream.distributed.ranks import Ranks
from optstream.training.optimizers import Rates, build_adamw, decay_groups
from optstream.training.updater import InMemory, StepCost


def make_module(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(dtype)


def in_memory(module: torch.nn.Module, lr: float = 0.01) -> InMemory:
    return InMemory(partial(build_adamw, module, Rates(lr, lr), 0.1), module, Ranks(None))


def set_grads(module: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def test_float32_is_the_optimizer_itself():
    module = make_module(torch.float32)
    updater = in_memory(module)
    params = [param for group in updater.optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in params} == {id(param) for param in module.parameters()}
    set_grads(module, 0)
    assert updater.step() == StepCost()


def test_bfloat16_equals_the_textbook_loop_bit_for_bit():
    module, reference = make_module(torch.bfloat16), make_module(torch.bfloat16)
    updater = in_memory(module)
    masters = make_module(torch.bfloat16).float()
    optimizer = build_adamw(masters, Rates(0.01, 0.01), 0.1)
    for step in range(10):
        set_grads(module, step)
        updater.step()
        set_grads(reference, step)
        for param, master in zip(reference.parameters(), masters.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        for param, master in zip(reference.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master)
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert all(param.dtype == torch.bfloat16 for param in module.parameters())


def test_small_updates_are_not_lost_in_bfloat16():
    module = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(module.weight)
    updater = InMemory(partial(torch.optim.SGD, module.parameters(), lr=1e-3), module, Ranks(None))
    for _ in range(20):
        module.weight.grad = torch.ones_like(module.weight)
        updater.step()
    assert module.weight.item() == torch.tensor(1 - 20 * 1e-3).bfloat16().item()


def test_without_gradient_nothing_moves():
    module = make_module(torch.bfloat16)
    before = [param.clone() for param in module.parameters()]
    updater = in_memory(module, lr=1.0)  # so that decay alone would be seen
    set_grads(module, 0)
    next(module.parameters()).grad = None
    updater.step()
    moved = [
        not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True)
    ]
    assert moved == [False, True, True, True]


def test_state_is_counted_with_its_masters():
    module = make_module(torch.bfloat16)
    updater = in_memory(module)
    set_grads(module, 0)
    updater.step()
    num_params = sum(param.numel() for param in module.parameters())
    assert updater.state_bytes() == 12 * num_params + 4 * 4  # a 4-byte step for each of 4


def test_vectors_and_frozen_parameters_are_treated_apart():
    module = make_module(torch.float32)
    module[1].requires_grad_(False)
    decayed, others = decay_groups(module, 0.3)
    assert [param.ndim for param in decayed["params"]] == [2]
    assert [param.ndim for param in others["params"]] == [1]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
