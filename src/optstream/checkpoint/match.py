"""Whether given state fits an optimizer: nothing is missing, left over, or cast."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.parts import Assembled
from optstream.errors import CheckpointError
from optstream.layout import is_streamed
from optstream.plan import MASTER, ParamSpec

_SHOWN = 3
_POSITIONAL = re.compile(r"group\d+\.param\d+", re.ASCII)
_LOW_PRECISION = (torch.bfloat16, torch.float16)

log = logging.getLogger("optstream")
State = Mapping[str, Any]


@dataclass
class Differences:
    """What does not fit, in words, by kind.

    Attributes:
        unfit: names of parameters of which some state is missing or has another form; the rest of
            it is worth nothing alone.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)

    def settle(self, source: str, strict: bool) -> None:
        """Raise or report.

        Args:
            source: what was given, named in messages.
            strict: every difference is an error, not only a warning.

        Raises:
            CheckpointError: names the first of each kind and counts the rest.
        """
        kinds = (
            ("has another form of", self.wrong, ""),
            ("has", self.extra, ", which this optimizer does not keep"),
            ("has no", self.missing, ", which this optimizer needs"),
        )
        texts = [f"{source} {verb} {some(names)}{why}" for verb, names, why in kinds if names]
        if texts and strict:
            raise CheckpointError(
                "; ".join(texts) + "; saved by another optimizer or model? (strict=False starts "
                "parameters anew whose state is not whole, and ignores what is too much)"
            )
        for text in texts:
            log.warning("%s; strict=False", text)
        if self.unfit:
            log.warning("%s: the state starts anew of %s", source, some(sorted(self.unfit)))
        if self.widened:
            log.warning("%s widened to float32: %s", source, some(self.widened))

    def lacks(self, name: str, label: str) -> None:
        self.missing.append(label)
        self.unfit.add(name)

    def differs(self, name: str, text: str) -> None:
        self.wrong.append(text)
        self.unfit.add(name)


def compare(
    specs: Sequence[ParamSpec],
    states: Mapping[str, State | None],
    known: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Differences:
    """Hold given state against what the optimizer keeps.

    Args:
        specs: the optimizer's parameters.
        states: by parameter name; None or absent: nothing was given for it. Empty: it has none yet.
        known: names of all parameters the optimizer has, planned or frozen.
        shapes: of the parameters that the state was made for, where that is known.
    """
    differences = Differences()
    for spec in specs:
        state, shape = states.get(spec.name), shapes.get(spec.name, spec.shape)
        if shape != spec.shape:
            differences.differs(spec.name, f"{spec.name!r} ({shape}, needed {spec.shape})")
        elif state is None:
            if spec.states or spec.counters:
                differences.lacks(spec.name, f"{spec.name!r}")
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
                differences.lacks(spec.name, label)
        elif tuple(value.shape) != tensor.shape:
            text = f"{label} ({tuple(value.shape)}, needed {tensor.shape})"
            differences.differs(spec.name, text)
        elif value.dtype != tensor.dtype:
            if value.dtype in _LOW_PRECISION and tensor.dtype == torch.float32:
                differences.widened.append(label)
            else:
                text = f"{label} ({value.dtype}, needed {tensor.dtype})"
                differences.differs(spec.name, text)
    for key in spec.counters:
        if key not in state:
            differences.lacks(spec.name, f"{spec.name!r}/{key}")
        elif isinstance(state[key], str):
            differences.differs(spec.name, f"{spec.name!r}/{key} ({state[key]!r}, needed a number)")
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
    return is_streamed(value) or isinstance(value, Assembled) or key == MASTER


def by_name(
    state_dict: Mapping[str, Any], names: Sequence[Sequence[str]], strict: bool
) -> tuple[list[dict[str, Any]], dict[str, State | None]]:
    """Return a torch state_dict's groups and states by parameter name.

    Its ids are matched by the names it carries ("param_names", or ids that are names), else by
    position.

    Args:
        names: the optimizer's own, by group.
        strict: names that differ are an error, not only a warning.

    Raises:
        CheckpointError: no state_dict, groups of other sizes, or other names.
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
        matched = _matched(group, own, strict)
        for identity, name in zip(ids, matched, strict=True):
            states[name] = saved_states.get(identity)
        groups.append({**group, "params": matched})
    unknown = set(saved_states) - {i for group in saved_groups for i in group["params"]}
    states.update({str(identity): saved_states[identity] for identity in unknown})
    return groups, states


def _matched(group: Mapping[str, Any], own: Sequence[str], strict: bool) -> list[str]:
    """Return the optimizer's names in the order of a given group's parameters."""
    ids = group["params"]
    given = [str(name) for name in group.get("param_names") or ids]
    if set(given) == set(own):
        return given
    named = "param_names" in group or any(isinstance(identity, str) for identity in ids)
    pairs = [pair for pair in zip(given, own, strict=True) if named and not _alike(*pair)]
    if pairs:
        text = f"the state_dict has {pairs[0][0]!r} where this optimizer has {pairs[0][1]!r}"
        if strict:
            raise CheckpointError(
                f"{text}; give it the names of this model, or strict=False to match by position"
            )
        log.warning("%s; matched by position because strict=False", text)
    return list(own)


def _alike(given: str, own: str) -> bool:
    """Tell whether two names may be one parameter's: a wrapper's prefix, or none is known."""
    return (
        own == given
        or _is_positional(own)
        or _is_positional(given)
        or own.endswith(f".{given}")
        or given.endswith(f".{own}")
    )


def check_groups(
    source: str, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], strict: bool
) -> None:
    """Raise CheckpointError unless each group has the same parameters, in whatever order.

    Where not strict, they may be others if they have names: positions would be guesses.
    """
    if len(groups) != len(names):
        raise CheckpointError(
            f"{source} has {len(groups)} param_groups, this optimizer has {len(names)}; build it "
            "with the same groups"
        )
    for index, (group, own) in enumerate(zip(groups, names, strict=True)):
        lacking = [name for name in own if name not in set(group["params"])]
        unknown = [name for name in group["params"] if name not in set(own)]
        if not (lacking or unknown):
            continue
        faults = [f"lacks {some([*map(repr, lacking)])}"] if lacking else []
        faults += [f"has the unknown {some([*map(repr, unknown)])}"] if unknown else []
        text = f"param_groups[{index}] of {source} {' and '.join(faults)}"
        if strict or any(map(_is_positional, (*own, *group["params"]))):
            raise CheckpointError(f"{text}; another model, or wrapped without model=?")
        log.warning("%s; strict=False", text)


def check_class(source: str, saved: str, optimizer: Optimizer, strict: bool) -> None:
    """Raise CheckpointError if another class of optimizer wrote the state, unless not strict."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if saved == kind:
        return
    text = f"{source} was saved by {saved}, this optimizer is {kind}"
    if strict:
        raise CheckpointError(f"{text}; use that one, or strict=False to take what fits")
    log.warning("%s; loaded because strict=False", text)


def _is_positional(name: str) -> bool:
    """Tell whether a parameter has no name but where it stands."""
    return _POSITIONAL.fullmatch(name) is not None
