"""SIGINT and SIGTERM: at once during set-up, after the current step or batch later.

set-up --signal--> Stopped
steps  --signal--> requested --end of step or batch--> leave the loop
                       `-----second signal--> Stopped
Stopped --signal--> ignored: what was opened is being closed
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal ended the run where no step could be finished first.

    Attributes:
        signum: number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Turn signals into a request that the training loop asks for.

    Attributes:
        signum: number of the signal that asked to stop; None so far.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._deferred = False
        self._stopped = False
        self._previous: dict[int, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        # only the main thread of a process may set handlers
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._receive) for s in _SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._stopped and error is not None and not isinstance(error, Stopped):
            # somebody took the signal for an error of their own, as an import may
            assert self.signum is not None
            raise Stopped(self.signum) from error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note the first signal instead of raising, until the block ends.

        Raises:
            Stopped: a second signal arrives in the block.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self._stopped:
            return
        second, self.signum = self.signum is not None, signum
        if second or not self._deferred:
            self._stopped = True
            raise Stopped(signum)
