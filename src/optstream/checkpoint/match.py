"""Whether given state fits an optimizer: nothing is missing, left over, or cast."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.errors import CheckpointError
from optstream.layout import is_streamed
from optstream.plan import MASTER, ParamSpec

_SHOWN = 3
_LOW_PRECISION = (torch.bfloat16, torch.float16)

log = logging.getLogger("optstream")
State = Mapping[str, Any]


@dataclass
class Differences:
    """What does not fit, in words, by kind."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)

    def settle(self, source: str, strict: bool) -> None:
        """Raise or report.

        Args:
            source: what was given, named in messages.
            strict: missing and extra state are errors too, not only warnings.

        Raises:
            CheckpointError: names the first of each kind and counts the rest.
        """
        faults = {"has another shape or dtype for": self.wrong}
        notes = {"has": self.extra, "has no": self.missing}
        advice = {
            "has": "which this optimizer does not keep",
            "has no": "which this optimizer needs",
        }
        texts = [f"{source} {verb} {some(names)}" for verb, names in faults.items() if names]
        lax = [
            f"{source} {verb} {some(names)}, {advice[verb]}"
            for verb, names in notes.items()
            if names
        ]
        if texts or (strict and lax):
            hint = "; saved by another optimizer or model?"
            if not texts:
                hint += " (strict=False starts what is missing anew and ignores the rest)"
            raise CheckpointError("; ".join(texts + lax) + hint)
        for text in lax:
            log.warning("%s; loaded without it because strict=False", text)
        if self.widened:
            log.warning("%s widened to float32: %s", source, some(self.widened))


def compare(
    specs: Sequence[ParamSpec], states: Mapping[str, State | None], known: Sequence[str]
) -> Differences:
    """Hold given state against what the optimizer keeps.

    Args:
        specs: the optimizer's parameters.
        states: by parameter name; None or absent: nothing was given for it. Empty: it has none yet.
        known: names of all parameters the optimizer has, planned or frozen.
    """
    differences = Differences()
    for spec in specs:
        state = states.get(spec.name)
        if state is None:
            if spec.states or spec.counters:
                differences.missing.append(f"{spec.name!r}")
        elif state:
            _compare_param(spec, state, differences)
    planned = {spec.name for spec in specs}
    for name, state in states.items():
        if name not in planned and (state or name not in known):
            differences.extra.append(f"{name!r}")
    return differences


def _compare_param(spec: ParamSpec, state: State, differences: Differences) -> None:
    wanted = {tensor.key: tensor for tensor in spec.states}
    given = [key for key, value in state.items() if _is_stored(key, value)]
    for key, tensor in wanted.items():
        label = f"{spec.name!r}/{key}"
        value = state.get(key)
        if not isinstance(value, Tensor):
            if key != MASTER:
                differences.missing.append(label)
        elif tuple(value.shape) != tensor.shape:
            text = f"{label} ({tuple(value.shape)}, needed {tensor.shape})"
            differences.wrong.append(text)
        elif value.dtype != tensor.dtype:
            if value.dtype in _LOW_PRECISION and tensor.dtype == torch.float32:
                differences.widened.append(label)
            else:
                differences.wrong.append(f"{label} ({value.dtype}, needed {tensor.dtype})")
    differences.missing += [f"{spec.name!r}/{key}" for key in spec.counters if key not in state]
    differences.extra += [f"{spec.name!r}/{key}" for key in given if key not in wanted]


def some(names: Sequence[str]) -> str:
    """Return the first few names and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def fitting(spec: ParamSpec, state: State) -> dict[str, Any]:
    """Return the part of a given state that the optimizer keeps."""
    wanted = {tensor.key for tensor in spec.states}
    return {key: v for key, v in state.items() if key in wanted or not _is_stored(key, v)}


def _is_stored(key: str, value: object) -> bool:
    """Tell whether it goes into a window: a scalar parameter's master does, too."""
    return is_streamed(value) or key == MASTER


def by_name(
    state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> tuple[list[dict[str, Any]], dict[str, State | None]]:
    """Return a torch state_dict's groups and states by parameter name.

    Its ids are matched by the names it carries ("param_names", or ids that are names), else by
    position.

    Args:
        names: the optimizer's own, by group.

    Raises:
        CheckpointError: no state_dict, or groups of other sizes.
    """
    try:
        saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in saved_groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"this is no state_dict of a torch optimizer: {error!r}") from error
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"the state_dict has groups of {sizes} parameters, this optimizer of "
            f"{[len(group) for group in names]}; build the optimizer as it was when saved"
        )
    groups: list[dict[str, Any]] = []
    states: dict[str, State | None] = {}
    for group, own in zip(saved_groups, names, strict=True):
        ids = list(group["params"])
        given = [str(name) for name in group.get("param_names") or ids]
        matched = given if set(given) == set(own) else list(own)
        for identity, name in zip(ids, matched, strict=True):
            states[name] = saved_states.get(identity)
        groups.append({**group, "params": matched})
    unknown = set(saved_states) - {i for group in saved_groups for i in group["params"]}
    states.update({str(identity): saved_states[identity] for identity in unknown})
    return groups, states


def check_groups(
    source: str, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> None:
    """Raise CheckpointError unless each group has the same parameters, in whatever order."""
    if len(groups) != len(names):
        raise CheckpointError(
            f"{source} has {len(groups)} param_groups, this optimizer has {len(names)}; build it "
            "with the same groups"
        )
    for index, (group, own) in enumerate(zip(groups, names, strict=True)):
        lacking = [repr(name) for name in own if name not in set(group["params"])]
        unknown = [repr(name) for name in group["params"] if name not in set(own)]
        if lacking or unknown:
            faults = [f"lacks {some(lacking)}"] if lacking else []
            faults += [f"has the unknown {some(unknown)}"] if unknown else []
            raise CheckpointError(
                f"param_groups[{index}] of {source} {' and '.join(faults)}; another model, or "
                "wrapped without model=?"
            )


def check_shapes(
    source: str, shapes: Mapping[str, tuple[int, ...]], specs: Sequence[ParamSpec]
) -> None:
    """Raise CheckpointError unless parameters are as they were; one without state tells nothing."""
    wrong = [
        f"{spec.name!r} ({shapes[spec.name]}, needed {spec.shape})"
        for spec in specs
        if shapes.get(spec.name, spec.shape) != spec.shape
    ]
    if wrong:
        raise CheckpointError(f"{source} has another shape for {some(wrong)}; another model?")


def check_class(source: str, saved: str, optimizer: Optimizer, strict: bool) -> None:
    """Raise CheckpointError if another class of optimizer wrote the state, unless not strict."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if saved == kind:
        return
    text = f"{source} was saved by {saved}, this optimizer is {kind}"
    if strict:
        raise CheckpointError(f"{text}; use that one, or strict=False to take what fits")
    log.warning("%s; loaded because strict=False", text)
