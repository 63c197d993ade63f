"""The state of a streamed optimizer by parameter, for whoever wants to look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from optstream.errors import StateChangedError
from optstream.state import StreamedState


class StateView(Mapping[Tensor, "ParamView"]):
    """The state by parameter, to look at: `optimizer.state[param]["exp_avg"]` is a copy, read now.

    Parameters that have no state yet are not in it. Writing to what it gives changes nothing;
    `load_state_dict` does.
    """

    def __init__(self, state: StreamedState) -> None:
        self._state = state

    def __getitem__(self, param: Tensor) -> ParamView:
        for index in self._state.with_state():
            if self._state.param(index) is param:
                return ParamView(self._state, index)
        raise KeyError("this parameter has no state, or is none of this optimizer's")

    def __setitem__(self, param: Tensor, value: object) -> None:
        # frameworks move what is no dict to a device and put it back: the view itself
        if not isinstance(value, ParamView):
            raise StateChangedError(
                "the state is on the drive and cannot be assigned; use load_state_dict"
            )

    def __iter__(self) -> Iterator[Tensor]:
        return (self._state.param(index) for index in self._state.with_state())

    def __len__(self) -> int:
        return len(self._state.with_state())


class ParamView:
    """One parameter's state; a tensor is read from the store when it is asked for.

    No Mapping: frameworks that move an optimizer's state to a device would copy all that is in one.
    """

    def __init__(self, state: StreamedState, index: int) -> None:
        self._state, self._index = state, index

    def __getitem__(self, key: str) -> Any:
        return self._state.look(self._index, key)

    def __contains__(self, key: object) -> bool:
        return key in self._state.keys(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        return self._state.keys(self._index)

    def items(self) -> Iterator[tuple[str, Any]]:
        return ((key, self[key]) for key in self)
