"""The thread that keeps a stream's books, where no interrupt reaches.

Python raises KeyboardInterrupt, and what other signal handlers raise, between any two lines of the
main thread: in the middle of a change of several attributes, or inside `Condition.__enter__` with
the lock taken. So the thread that steps changes nothing of a stream itself:

    the thread that steps                         keeper
    put a call ──────────────► SimpleQueue ─────► run it, whole, one after another
    get its result ◄────────── SimpleQueue ◄───── put what it returned or raised

Both queues are C code, which an interrupt leaves as it was. A call whose caller was interrupted
runs all the same; what it took, the next scan gives back.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from optstream.errors import ClosedError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Kept")


class Keeper:
    """Runs calls on one thread in the order in which they come."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # a daemon: it must still be there when, at exit, what was not closed is
        self._thread = threading.Thread(target=self._run, name="optstream-keeper", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], R]) -> R:
        """Return what a function returns, or raise what it raises.

        Raises:
            ClosedError: in a forked child, which has neither the thread nor the buffers.
        """
        self.check_process()
        if threading.current_thread() is self._thread:
            return function()
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def answer() -> None:
            try:
                outcome.put((function(), None))
            except BaseException as error:
                outcome.put((None, error))

        self._calls.put(answer)
        result, error = outcome.get()
        if error is None:
            return result  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # it holds this frame

    def post(self, function: Callable[[], None]) -> None:
        """Run a function behind all earlier calls; wait for nothing, hear of no error."""

        def run() -> None:
            try:
                function()
            except Exception:
                return

        self.check_process()
        self._calls.put(run)

    def check_process(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(
                "the state belongs to the parent process; a forked child cannot use it"
            )

    def close(self) -> None:
        """End the thread behind all earlier calls; may be called twice."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds must not live until the next one


class Kept:
    """Base of what has a keeper."""

    def __init__(self) -> None:
        self._keeper = Keeper()

    def check_process(self) -> None:
        """Raise ClosedError in a forked child."""
        self._keeper.check_process()


def by_keeper(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method run on its object's keeper."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._keeper.call(lambda: method(self, *args, **kwargs))

    return call
