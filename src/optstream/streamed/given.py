"""Whole state, and what of it this rank keeps: all, or its part of sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optstream.checkpoint.manifest import Manifest, StoredParam
from optstream.checkpoint.parts import Held
from optstream.checkpoint.snapshot import Snapshot
from optstream.codecs import SPLIT
from optstream.distributed.placements import all_regions, like, region_of
from optstream.distributed.region import Region
from optstream.distributed.shards import here, is_sharded
from optstream.errors import CheckpointError
from optstream.plan import ParamSpec
from optstream.streamed.roster import Roster
from optstream.update import Record


def whole_specs(roster: Roster) -> list[ParamSpec]:
    """Return what this rank plans for, with the shapes of whole parameters in place of shards'."""
    specs = []
    for index, spec in enumerate(roster.plan.params):
        shape = tuple(roster.param(index).shape)
        states = tuple(
            replace(state, shape=shape) if state.shape == spec.shape else state
            for state in spec.states
        )
        specs.append(replace(spec, shape=shape, states=states))
    return specs


def check_shards(spec: ParamSpec, record: Record) -> None:
    """Refuse state of a shard of which nobody could say where it is in the whole.

    Raises:
        CheckpointError: names it.
    """
    if record.unplanned:
        key = next(iter(next(iter(record.unplanned.values()))))
        raise CheckpointError(
            f"{spec.name}/{key} was not foreseen when the optimizer was wrapped, and of shards "
            "such state cannot be saved; wrap the optimizer again"
        )
    for state in spec.states:
        in_order = torch.empty_strided(state.shape, state.stride, device="meta").is_contiguous()
        if state.key in record.stored and not (state.shape == spec.shape and in_order):
            raise CheckpointError(
                f"{spec.name}/{state.key} of shape {state.shape}, strides {state.stride}, belongs "
                f"to a shard of shape {spec.shape} and is not one value for each of its elements, "
                "row by row, so it cannot be saved; use this optimizer without sharding"
            )


def part_of(snapshot: Snapshot, name: str, param: Tensor, folder: Path) -> dict[str, Any]:
    """Return a parameter's state from a snapshot of this rank, as its optimizer would have it."""
    region = region_of(name, param)
    state = snapshot.state(name, Held(region, here(param)), folder, region)
    tensors = snapshot.manifest.params[name].tensors
    return {key: like(value, param) if key in tensors else value for key, value in state.items()}


def own_part(name: str, param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return given state as this rank keeps it.

    Args:
        state: of the whole parameter, as DTensors of its placements, or of this rank's part.

    Raises:
        CheckpointError: a DTensor with other placements.
    """
    region = region_of(name, param)
    return {key: _own(f"{name}/{key}", value, param, region) for key, value in state.items()}


def _own(label: str, value: Any, param: Tensor, region: Region) -> Any:
    if not isinstance(value, Tensor):
        return value
    given = region_of(label, value)
    if given != Region.whole(value.shape) and given != region:
        raise CheckpointError(
            f"{label} has the placements {getattr(value, 'placements', None)} and its parameter "
            f"{getattr(param, 'placements', None)}; make them equal with redistribute(), or give "
            "whole tensors (full_state_dict=True)"
        )
    if given == region or value.shape != param.shape:
        return here(value)
    return Held(given, here(value)).of(region)


# -- split masters ----------------------------------------------


def gathers(param: Tensor, stored: StoredParam) -> bool:
    """Tell, the same on all ranks, whether a shard of split masters meets other ranks' weights."""
    return is_sharded(param) and any(
        region.numel and region not in {shard.region for shard in tensor.shards}
        for tensor in stored.tensors.values()
        if tensor.codec == SPLIT
        for region in all_regions(param)
    )


def held(name: str, param: Tensor, stored: StoredParam) -> Held:
    """Return the values of a parameter that its split masters need; the ranks call it together."""
    if not gathers(param, stored):
        return Held(region_of(name, param), here(param))
    with torch.no_grad():
        return Held(Region.whole(param.shape), param.full_tensor())  # type: ignore[attr-defined]


# -- windows ----------------------------------------------


def same_windows(roster: Roster, manifest: Manifest) -> dict[int, int] | None:
    """Return which windows of a checkpoint hold what this rank's windows hold, at the same places.

    Returns:
        None where there is no such window for some state of the checkpoint.
    """
    found: dict[int, int] = {}
    for index, spec in enumerate(roster.plan.params):
        stored = manifest.params.get(spec.name)
        if stored is None or gathers(roster.param(index), stored):
            return None
        for key in stored.tensors:
            pairs = _same_pieces(roster, index, key, stored)
            if pairs is None or any(found.setdefault(mine, it) != it for mine, it in pairs):
                return None
    return found


def _same_pieces(
    roster: Roster, index: int, key: str, stored: StoredParam
) -> Sequence[tuple[int, int]] | None:
    """Return, of this rank's and the stored pieces of a tensor, the windows; None: they differ."""
    spec, tensor = roster.plan.params[index], stored.tensors[key]
    if all(state.key != key for state in spec.states):
        return None
    region = region_of(spec.name, roster.param(index))
    if region == Region.whole(stored.shape):
        region = Region.whole(tensor.shape)
    if region.numel == 0:
        return ()
    shard = next((shard for shard in tensor.shards if shard.region == region), None)
    mine = list(roster.stored_pieces(index, key))
    if shard is None or [replace(piece, window=0) for piece in mine] != [
        replace(piece, window=0) for piece in shard.pieces
    ]:
        return None
    return [(own.window, it.window) for own, it in zip(mine, shard.pieces, strict=True)]
