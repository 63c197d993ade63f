"""The state of a streamed optimizer by parameter, for whoever wants to look at it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from optstream.distributed.shards import here
from optstream.errors import StateChangedError
from optstream.streamed.state import StreamedState
from optstream.update import stored_values, working_copy


class StateView(Mapping[Tensor, "ParamView"]):
    """The state by parameter, to look at: `optimizer.state[param]["exp_avg"]` is a copy, read now.

    Parameters that have no state yet are not in it. Writing to what it gives changes nothing;
    `load_state_dict` does.
    """

    def __init__(self, state: StreamedState) -> None:
        self._state = state
        self._index: dict[int, int] = {}

    def __getitem__(self, param: Tensor) -> ParamView:
        index = self._find(param)
        if index is None or not self._has_state(index):
            raise KeyError("this parameter has no state, or is none of this optimizer's")
        return ParamView(self._state, index)

    def __setitem__(self, param: Tensor, value: object) -> None:
        # frameworks move what is no dict to a device and put it back: the view itself
        if not isinstance(value, ParamView):
            raise StateChangedError(
                "the state is on the drive and cannot be assigned; use load_state_dict"
            )

    def __iter__(self) -> Iterator[Tensor]:
        return (self._state.roster.param(index) for index in self._indices())

    def __len__(self) -> int:
        return len(self._indices())

    def _find(self, param: Tensor) -> int | None:
        roster = self._state.roster
        index = self._index.get(id(param))
        if index is None or roster.param(index) is not param:  # replaced, or of a later group
            params = range(len(self._state.plan.params))
            self._index = {id(roster.param(i)): i for i in params}
            index = self._index.get(id(param))
        return index

    def _has_state(self, index: int) -> bool:
        record = self._state.records.get(index)
        return record is not None and bool(record.stored or record.kept)

    def _indices(self) -> list[int]:
        """Return which parameters of the plan have state, in the order of the groups."""
        specs = self._state.plan.params
        indices = filter(self._has_state, self._state.records)
        return sorted(indices, key=lambda i: (specs[i].group, specs[i].position))


class ParamView:
    """One parameter's state; a tensor is read from the store when it is asked for.

    No Mapping: frameworks that move an optimizer's state to a device would copy all that is in one.
    """

    def __init__(self, state: StreamedState, index: int) -> None:
        self._state, self._index = state, index

    def __getitem__(self, key: str) -> Any:
        record = self._state.records[self._index]
        if key in record.kept:
            return working_copy({key: record.kept[key]})[key]
        if key not in record.stored:
            raise KeyError(key)
        return self._read(key)

    def _read(self, key: str) -> Tensor:
        specs = self._state.plan.params[self._index].states
        state = next(state for state in specs if state.key == key)
        flat = torch.empty(math.prod(state.shape), dtype=state.dtype)
        for window, piece in self._state.roster.pieces(self._index):
            extent = piece.extent(key)
            data = self._state.stream.look(window, extent.offset, extent.num_bytes)
            param = here(self._state.roster.param(self._index))
            values = stored_values(data, extent, piece, param)
            flat[piece.start : piece.start + extent.numel] = values
        return flat.as_strided(state.shape, state.stride)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        record = self._state.records[self._index]
        streamed = [state.key for state in self._state.plan.params[self._index].states]
        return [*record.kept, *(key for key in streamed if key in record.stored)]

    def items(self) -> Iterator[tuple[str, Any]]:
        return ((key, self[key]) for key in self)
