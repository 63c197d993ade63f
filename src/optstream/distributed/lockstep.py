"""Windows that all ranks update together: nobody begins one that another rank has no data for.

They follow each other in every rank's scan, at its start or its end, and are as many:

    rank 0   meet - update - meet - update - meet - windows of its own ...
    rank 1   meet - update - read fails: told where the others meet; all of them end the step
"""

from __future__ import annotations

from types import TracebackType

from optstream.distributed.ranks import Ranks


class Lockstep:
    """One scan; a context, so that an error inside is told to ranks that wait for this one."""

    def __init__(self, ranks: Ranks, starts_together: bool) -> None:
        """Begin a scan.

        Args:
            starts_together: its first window is one that all ranks update together.
        """
        self._ranks = ranks
        self._together = starts_together

    def meet(self, together: bool) -> None:
        """Wait for the other ranks before a window, if that or the one before is updated together.

        Args:
            together: the next window is; False after the last one.

        Raises:
            RankError: another rank has failed.
        """
        if self._together or together:
            self._ranks.gather(None)
        self._together = together

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # elsewhere the others need this rank's values first, see Exchange.finish
        if error is not None and self._together:
            self._ranks.tell(error)
