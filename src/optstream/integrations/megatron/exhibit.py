"""Tensors from files in the places where Megatron looks for masters and state.

Its own code then saves, loads and reshards them as it always does:

    reading   mapped from a snapshot, so that nothing is in memory that was not looked at
    writing   a copy in a scratch file on the drive; afterwards it is put back window by window
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optstream.integrations.megatron.held import Groups, masters_attribute
from optstream.plan import EXTENT_ALIGNMENT, MASTER, ParamSpec, aligned
from optstream.store.checks import check_space

States = list[list[dict[str, Any]]]
"""By group and position: tensors and counters by the inner optimizer's keys, masters by MASTER."""


@contextlib.contextmanager
def exhibited(child: Any, held: Groups, states: States) -> Iterator[None]:
    """Let a child and its inner optimizer hold these masters and this state."""
    inner, attribute = child.optimizer, masters_attribute(child)
    own = getattr(child, attribute, [])
    shown: dict[int, Tensor] = {}
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, of_group, values in zip(inner.param_groups, held, states, strict=True):
        for one, of_one in zip(of_group, values, strict=True):
            shown[id(one.tensor)] = tensor = _stand_in(one.tensor, of_one.get(MASTER))
            kept = {key: value for key, value in of_one.items() if key != MASTER}
            if kept:
                state[tensor] = kept
        group["params"] = [shown[id(one.tensor)] for one in of_group]
    if attribute:
        # new lists: Megatron gives them out in its state_dict
        setattr(child, attribute, [[shown[id(master)] for master in group] for group in own])
    inner.state = state
    try:
        yield
    finally:
        # loading made new groups
        for group, of_group in zip(inner.param_groups, held, strict=True):
            group["params"] = [one.tensor for one in of_group]
        if attribute:
            setattr(child, attribute, own)
        inner.state = defaultdict(dict)


def shown_states(child: Any) -> States:
    """Return what a child holds while it is exhibited, as Megatron has left it."""
    inner = child.optimizer
    lists = getattr(child, masters_attribute(child), [])
    masters = {id(master) for group in lists for master in group}
    return [
        [
            {**inner.state.get(p, {}), **({MASTER: p.detach()} if id(p) in masters else {})}
            for p in group["params"]
        ]
        for group in inner.param_groups
    ]


def _stand_in(tensor: Tensor, master: Tensor | None) -> Tensor:
    if master is None:
        return tensor
    vars(master).update(vars(tensor))
    return master


def scratch_copy(directory: Path, specs: Sequence[ParamSpec], states: States) -> States:
    """Return all state that the optimizer will ever keep, writable, in a nameless file.

    What there is already is copied; the rest is zeros, which is how the rules start.

    Raises:
        OutOfSpaceError: with needed and free bytes.
    """
    sizes = [
        aligned(tensor.num_bytes, EXTENT_ALIGNMENT) for spec in specs for tensor in spec.states
    ]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_space([(directory, sum(sizes))], "loading, which goes through a copy of the state,")
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, max(1, sum(sizes)))
        memory = mmap.mmap(file.fileno(), max(1, sum(sizes)))
    result: States = [[dict(of_one) for of_one in group] for group in states]
    offset = 0
    for spec in specs:
        of_param = result[spec.group][spec.position]
        for tensor in spec.states:
            flat = _at(memory, offset, tensor.num_bytes, tensor.dtype)
            written = flat.as_strided(tensor.shape, tensor.stride)
            if tensor.key in of_param:
                written.copy_(of_param[tensor.key])
            of_param[tensor.key] = written
            offset += aligned(tensor.num_bytes, EXTENT_ALIGNMENT)
        if "step" in spec.counters:
            of_param.setdefault("step", torch.zeros((), dtype=torch.float32))
    return result


def _at(memory: mmap.mmap, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, offset=offset, count=num_bytes // dtype.itemsize)


def packed(groups: Sequence[Mapping[str, Any]], states: States) -> dict[str, Any]:
    """Return states in the form of a torch state_dict."""
    names = [group["param_names"] for group in groups]
    return {
        "state": {
            name: of_one
            for of_names, of_group in zip(names, states, strict=True)
            for name, of_one in zip(of_names, of_group, strict=True)
        },
        "param_groups": [
            {**group, "params": of_names} for group, of_names in zip(groups, names, strict=True)
        ],
    }


def unpacked(state_dict: Mapping[str, Any]) -> States:
    """Return the states of a torch state_dict by group and position."""
    state = state_dict["state"]
    return [
        [dict(state.get(identity, {})) for identity in group["params"]]
        for group in state_dict["param_groups"]
    ]
