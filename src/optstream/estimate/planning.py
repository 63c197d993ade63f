"""The plans that `offload` would make on each rank, from parameters without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from optstream.codecs import EXACT, CodecChoice
from optstream.distributed.shares import Shares
from optstream.errors import ConfigError
from optstream.plan import ParamSpec, Plan
from optstream.ram import Budget
from optstream.streamed.params import Describer, parameter_names, unplanned
from optstream.streamed.roster import cost_of, empty_plan
from optstream.units import format_bytes

NO_RAM = Budget()
MAX_WINDOWS = 100_000


def describe_all(
    model: nn.Module, optimizer: Optimizer, device: str, codec: str = EXACT
) -> list[ParamSpec]:
    """Return what the plan is told of every parameter, as `offload` tells it.

    Args:
        model: may be on the meta device.
        device: where its parameters will be: "cpu", "cuda".
        codec: how state is stored.

    Raises:
        UnsupportedOptimizerError: see `Describer.describe`.
        ConfigError: a codec that fits no state.
    """
    codecs = CodecChoice(codec)
    describer = Describer(optimizer, master_weights=True, device=device, codecs=codecs)
    groups = optimizer.param_groups
    names = parameter_names(groups, model)
    specs = [
        describer.describe(names[group, position], group, position)
        for group, position in unplanned((), groups, {})
    ]
    codecs.check_used()
    return specs


def make_plans(
    specs: Sequence[ParamSpec],
    optimizer: Optimizer,
    window_bytes: int,
    budget: Budget = NO_RAM,
    num_ranks: int = 1,
) -> list[Plan]:
    """Return the plan of each rank; a parameter is kept whole by one of them.

    Args:
        budget: of memory for windows that stay, of each rank.

    Raises:
        ConfigError: see `resized`.
    """
    costs = [cost_of(spec, optimizer) for spec in specs]
    owners = Shares.none(num_ranks).owners_of(costs, [False] * len(specs))
    kept: list[list[ParamSpec]] = [[] for _ in range(num_ranks)]
    for spec, owner in zip(specs, owners, strict=True):
        kept[owner].append(spec)
    empty = empty_plan(window_bytes, num_ranks)
    return [resized(replace(empty, params=tuple(own)), window_bytes, budget) for own in kept]


def resized(plan: Plan, window_bytes: int, budget: Budget) -> Plan:
    """Return the plan of the same parameters with windows of another size.

    Raises:
        ConfigError: so many windows that no process could have a file for each.
    """
    state_bytes = sum(spec.state_bytes for spec in plan.params)
    if state_bytes > MAX_WINDOWS * window_bytes:
        raise ConfigError(
            f"{format_bytes(state_bytes)} of state are {state_bytes // window_bytes} windows of "
            f"{format_bytes(window_bytes)}, and each is an open file; give a larger --window"
        )
    empty = Plan(window_bytes, exchange_bytes=plan.exchange_bytes)
    new = empty.extended(plan.params)
    return new.with_resident(budget.of(new))
