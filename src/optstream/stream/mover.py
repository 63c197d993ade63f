"""The contract of what moves windows between the store and the memory in which they are updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from optstream.plan import Plan
from optstream.stream.lane import Wait
from optstream.stream.slots import Slot


class Mover(ABC):
    """Moves the windows that are not resident; one thread calls.

    Attributes:
        hosts: buffers to be pinned.
    """

    hosts: Sequence[Tensor] = ()

    @abstractmethod
    def resize(self, plan: Plan, unpin: Wait) -> None:
        """Make the buffers that a larger plan wants; none is in use.

        Args:
            unpin: to be called before a buffer is given back.
        """

    @abstractmethod
    def look_ahead(self, order: Sequence[int]) -> None:
        """Start bringing in windows that will be taken in this order, as far as there is room."""

    @abstractmethod
    def take(self, window: int) -> Slot:
        """Return a window's slot for its update, once its bytes are there.

        Raises:
            WindowReadError, WindowWriteError: it, or room for it, is not to be had; nothing was
                changed.
        """

    @abstractmethod
    def give_back(self, slot: Slot, window: int, ready: Wait) -> None:
        """Take what a window was updated to; `ready` blocks until it is in the slot."""

    @abstractmethod
    def drop(self) -> None:
        """Forget an update that did not end, and what was to be read ahead."""

    @abstractmethod
    def holding(self, window: int) -> Slot | None:
        """Return the slot with a window's newest bytes, None where the store has them."""

    @abstractmethod
    def refused(self) -> Mapping[int, Exception]:
        """Return the windows that could not be written, which memory holds, and why."""

    @abstractmethod
    def retry(self) -> None:
        """Try again to write those, and wait for that."""

    @abstractmethod
    def write_back(self) -> None:
        """Have all that was updated written or on its way, for a snapshot."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing is under way."""

    @abstractmethod
    def forget(self) -> None:
        """Hold nothing: other bytes are the state now."""

    @abstractmethod
    def close(self) -> None:
        """Start nothing more, and end what has threads of its own."""

    @abstractmethod
    def free(self) -> None:
        """Give the buffers back; all transfers are over."""
