"""What we know of an optimizer's rule: whether it can be streamed, and whether it can be sliced.

Streaming updates parameters apart from each other, so the rule must not look from one parameter at
another. torch's own optimizers are known; any other is tried on a few small parameters, together
and apart, and must give the same bits.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.errors import UnsupportedOptimizerError
from optstream.layout import Shell, hyperparameters
from optstream.streamed.lifetime import is_offloaded

_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
_ELEMENTWISE = (*_ADAMS, "SGD", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")
_PER_PARAMETER = ("Adafactor", "Muon")
_TRIAL_STEPS = 8
_TRIAL_EDGE = 8
_TRIAL_LR = 1.0

log = logging.getLogger("optstream")


def _torch_classes(names: Sequence[str]) -> frozenset[type]:
    """Return the classes of these names that the installed torch has."""
    return frozenset(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


ELEMENTWISE = _torch_classes(_ELEMENTWISE)
PER_PARAMETER = _torch_classes(_PER_PARAMETER)


def is_elementwise(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether the rule may be applied to any flat slice of a parameter of this group.

    A class says so itself with a method `is_elementwise(group) -> bool`; torch's own are known by
    their exact class (a subclass may do anything). What is not known is taken as whole parameters.
    """
    own = getattr(optimizer, "is_elementwise", None)
    if own is not None:
        return bool(own(group))
    return type(optimizer) in ELEMENTWISE


def gathers(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> int | None:
    """Tell whether a DTensor is updated together with the ranks that have its other parts.

    A class that updates DTensors of matrices by whole matrices says so with a method
    `gathers(group, param) -> int`: how many times the largest part one rank puts together at once;
    0 where this rank's part is a parameter by itself. Its step then gets DTensors, the same ones on
    all those ranks. None: it has no such method.
    """
    own = getattr(optimizer, "gathers", None)
    return None if own is None else int(own(group, param))


def update_flops(optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Count the operations of updating one parameter, beyond a pass over it.

    A class whose rule is expensive says so with a method `update_flops(group, shape) -> int`; what
    says nothing costs ranks only the bytes of its state.
    """
    own = getattr(optimizer, "update_flops", None)
    return int(own(group, shape)) if own is not None else 0


def check_optimizer(optimizer: object) -> None:
    """Refuse what cannot be streamed.

    Raises:
        UnsupportedOptimizerError: not a torch optimizer, needs a closure, wants sparse gradients,
        or lets
            one parameter's update depend on another's.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizerError(
            f"offload needs a torch.optim.Optimizer, got {name}; wrap the optimizer itself, "
            "and give its wrapper (scaler, scheduler) the result"
        )
    if hasattr(optimizer, "plan") and hasattr(optimizer, "report"):
        raise UnsupportedOptimizerError(f"this {name} is offloaded already; use it as it is")
    if is_offloaded(optimizer):
        raise UnsupportedOptimizerError(
            f"this {name} is offloaded already; use what offload() returned, or close that first"
        )
    if _needs_closure(optimizer):
        raise UnsupportedOptimizerError(
            f"{name} cannot be offloaded: it evaluates a closure several times a step and its "
            "state spans all parameters; use it without offload"
        )
    wrapped = next(
        (value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None
    )
    if wrapped is not None:
        inner = type(wrapped).__name__
        raise UnsupportedOptimizerError(
            f"{name} cannot be offloaded: it steps another optimizer, {inner}; "
            f"offload the {inner} and give {name} the result"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedOptimizerError(
            f"{name} cannot be offloaded: it updates the few rows that a sparse gradient names, "
            "while streaming moves whole windows; use AdamW with dense gradients"
        )
    if type(optimizer) not in ELEMENTWISE | PER_PARAMETER and not hasattr(
        optimizer, "is_elementwise"
    ):
        _check_independence(optimizer)


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_independence(optimizer: Optimizer) -> None:
    """Step a few small parameters together and apart; the bits must be the same."""
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            together = _trial(optimizer, _small_groups(optimizer), apart=False)
            apart = _trial(optimizer, _small_groups(optimizer), apart=True)
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        log.warning(
            "cannot try %s on small parameters (%r), so it is not known whether one parameter's "
            "update depends on another's; if it does, results differ from the plain optimizer's",
            name,
            error,
        )
        return
    if not all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        raise UnsupportedOptimizerError(
            f"{name} cannot be offloaded: one parameter's update depends on other parameters or on "
            "random numbers (a global norm, a shared step size), and streaming sees a few "
            "parameters at a time; use it without offload"
        )


def _small_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups with two small real parameters each, of dimensions they really have."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for group in optimizer.param_groups:
        dims = [p.dim() for p in group["params"]] or [2]
        shapes = [(_TRIAL_EDGE,) * dim for dim in (min(dims), max(dims))]
        params = [nn.Parameter(_random(shape, generator)) for shape in shapes]
        groups.append({**copy.deepcopy(hyperparameters(group)), "params": params})
        if not group.get("lr", True):
            groups[-1]["lr"] = _TRIAL_LR  # a warm-up begins at 0, which would hide everything
    return groups


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    # float64 shows what float32 rounds away in so few steps
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _trial(optimizer: Optimizer, groups: list[dict[str, Any]], *, apart: bool) -> list[Tensor]:
    params = [param for group in groups for param in group["params"]]
    if apart:
        calls = [
            [{**copy.deepcopy(hyperparameters(group)), "params": [param]}]
            for group in groups
            for param in group["params"]
        ]
    else:
        calls = [groups]
    shells = [Shell(optimizer, call) for call in calls]
    for shell in shells:
        vars(shell.optimizer).update(_containers(optimizer))
    generator = torch.Generator().manual_seed(1)
    # a steady direction: a rule that adapts its step size to the progress made begins to do so
    directions = [_random(param.shape, generator) for param in params]
    for _ in range(_TRIAL_STEPS):
        for index, (param, direction) in enumerate(zip(params, directions, strict=True)):
            noise = _random(param.shape, generator)
            param.grad = (direction + 0.1 * noise) * 10.0 ** (index % 4)
        with torch.no_grad():
            for shell in shells:
                shell.step()
    for shell in shells:
        _check_containers(optimizer, shell.optimizer)
    return [param.detach().view(torch.int64) for param in params]


def _containers(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of what a rule of its own may keep things in, beside torch's `state`."""
    torchs = ("defaults", "param_groups", "state")
    return {
        name: copy.copy(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, dict | list | set) and name not in torchs and "_hooks" not in name
    }


def _check_containers(optimizer: Optimizer, stepped: Optimizer) -> None:
    for name, value in _containers(optimizer).items():
        if len(getattr(stepped, name)) != len(value):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} cannot be offloaded: its step keeps something in its "
                f"own attribute {name!r}, which streaming does not see; keep what belongs to a "
                "parameter in self.state[parameter], or use it without offload"
            )
