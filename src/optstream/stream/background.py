"""One piece of work beside training: making a checkpoint."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable


class Background:
    """Runs one call at a time on a thread of its own; its error is given once, by `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Start a call; the one before must be over (`wait`)."""
        assert self._thread is None
        thread = threading.Thread(target=self._run, args=(call,), name="optstream-save")
        thread.start()
        self._thread = thread  # one that could not be started cannot be waited for

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error
            del call
            _clear_frames(error)

    @property
    def done(self) -> bool:
        """Tell whether nothing is running."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the call is over; raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _clear_frames(error: BaseException) -> None:
    """Forget what the calls that failed held: frozen files, as long as anybody keeps the error."""
    left: list[BaseException | None] = [error]
    seen: list[BaseException] = []  # an error may be its own cause
    while left:
        each = left.pop()
        if each is None or each in seen:
            continue
        seen.append(each)
        traceback.clear_frames(each.__traceback__)
        left += (each.__cause__, each.__context__)
