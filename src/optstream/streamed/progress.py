"""How far a step has come: a step that failed goes on with the windows that are left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from optstream.checkpoint.match import some
from optstream.errors import WindowIOError


class Progress:
    """Windows updated by the step that is under way, and the direction of the scan.

    Attributes:
        done: windows that a step, which may have failed, has updated; none between steps.
        backwards: whether the scan goes from the last window to the first; every other one that
            moves windows on some rank does, so that all ranks turn together.
    """

    def __init__(self) -> None:
        self.forget()
        self.backwards = False

    def forget(self) -> None:
        """Forget a step that failed half-way."""
        self.done: set[int] = set()
        self._num_left = 0
        self._moves = False

    def begin(self, left: Sequence[int], moves: bool) -> None:
        """Begin a step or go on with it.

        Args:
            left: windows of this rank that it is to update.
            moves: whether any rank has some.
        """
        self._num_left = len(left)
        self._moves = self._moves or moves

    def advance(self, window: int) -> None:
        """Note that a window is updated."""
        self.done.add(window)
        self._num_left -= 1

    def finish(self) -> int:
        """End a step; return how many windows it has updated."""
        num_windows = len(self.done)
        if self._moves:
            self.backwards = not self.backwards
        self.forget()
        return num_windows

    @contextlib.contextmanager
    def named(self, step: int, tensors_at: Callable[[WindowIOError], list[str]]) -> Iterator[None]:
        """Say in an I/O error what it holds and how far the step came."""
        try:
            yield
        except WindowIOError as error:
            names = tensors_at(error)
            error.progress = f"that is {some(names)}; " if names else ""
            error.progress += (
                f"step {step} has updated {len(self.done)} windows and left {self._num_left}; "
                "call step() again with the same gradients to finish it"
            )
            raise
