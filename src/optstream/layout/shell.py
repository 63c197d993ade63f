"""An optimizer's own step on other groups and other state, and what it changed there."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def step_on(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]
) -> dict[str, Any]:
    """Let an optimizer step on other groups and state.

    A stand-in of the same class and with the same attributes steps, so that an interrupt cannot
    leave the optimizer itself between its own groups and the others. No hook runs: those belong to
    the whole step, and a subclass whose step calls its base's would run them there.

    Returns:
        the attributes that the step changed (a counter), by name.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    given = {
        "param_groups": groups,
        "state": state,
        "_optimizer_step_pre_hooks": {},
        "_optimizer_step_post_hooks": {},
    }
    before = {**vars(optimizer), **given}
    stand_in = object.__new__(type(optimizer))
    vars(stand_in).update(before)
    step(stand_in)
    return {
        key: value
        for key, value in vars(stand_in).items()
        if key not in given and (key not in before or value is not before[key])
    }


class Shell:
    """A shallow copy of an optimizer with groups and state of its own."""

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.optimizer = copy.copy(optimizer)
        # copy.copy goes through torch's __getstate__, which keeps only groups, state and defaults
        self.optimizer.__dict__.update(optimizer.__dict__)
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self.changed_attributes: dict[str, Any] = {}

    def step(self) -> None:
        self.changed_attributes = step_on(self.optimizer, self.groups, self.state)
        vars(self.optimizer).update(self.changed_attributes)


def is_streamed(value: object) -> bool:
    """Tell whether a state value goes into a window: tensors do, but for 0-dim ones (counters)."""
    return isinstance(value, Tensor) and value.dim() > 0


def kept_value(value: Any, narrow: torch.dtype, wide: torch.dtype) -> Any:
    """Return a copy of a counter, of a 0-dim parameter's state or of a Python value.

    Args:
        narrow, wide: what has the parameter's dtype gets its master's.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to(wide if value.dtype == narrow else value.dtype, copy=True)


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param_group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copied_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param_group's hyperparameters for a step that may change them in place."""
    return {
        key: value.clone()
        if isinstance(value, Tensor)
        else copy.copy(value)
        if isinstance(value, list | dict)
        else value
        for key, value in hyperparameters(group).items()
    }


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that a step added to its group or changed in it."""
    return {
        key: value
        for key, value in hyperparameters(after).items()
        if key not in before or not _equal(before[key], value)
    }


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is right or bool(left == right)
