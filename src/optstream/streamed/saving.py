"""Save an optimizer's state: as a checkpoint on a filesystem, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.directory import check_space, check_target, existing_parent
from optstream.checkpoint.merge import merged
from optstream.checkpoint.publish import publish
from optstream.checkpoint.snapshot import Snapshot
from optstream.distributed.ranks import Ranks
from optstream.errors import OutOfSpaceError
from optstream.stream.background import Background
from optstream.streamed.freezing import Freezer
from optstream.streamed.given import part_of
from optstream.streamed.state import StreamedState


class Saver:
    """Makes checkpoints, one at a time; all ranks together.

    Attributes:
        background: the save that is under way, if any.
        freezer: makes its snapshots.
    """

    def __init__(self, optimizer: Optimizer, state: StreamedState) -> None:
        self.background = Background()
        self._state = state
        self.freezer = Freezer(optimizer, state)

    def save(self, path: Path, step: int) -> None:
        """Start making a checkpoint of the state as it is now; `background.wait` ends it.

        What the last step still writes is not waited for here.

        Raises:
            OutOfSpaceError, StoreError: see StreamedOptimizer.save; nothing was changed.
        """
        self.background.wait()
        ranks, room = self._state.ranks, True
        with ranks.together():
            check_target(path)
            away_bytes = ranks.gather(self.freezer.bytes_off(existing_parent(path)))
            check_space(path, sum(away_bytes))
            try:
                settled = self.freezer.freeze(step)
            except OutOfSpaceError:
                if ranks.size > 1 or sum(away_bytes) < self.freezer.file_bytes:
                    raise
                # all is copied: no room is needed if that ends before the next step
                settled, room = self.freezer.freeze(step, room=False), False
        self.background.start(partial(_publish, settled, path, ranks.beside()))
        if not room:
            del settled
            self.background.wait()

    def by_param(self, step: int) -> dict[Tensor, dict[str, Any]]:
        """Return a snapshot's tensors and values by parameter."""
        snapshot, roster = self.freezer.snapshot(step), self._state.roster
        folder = self._state.store.folder
        planned = [
            (roster.param(index), spec) for index, spec in enumerate(self._state.plan.params)
        ]
        return {param: part_of(snapshot, spec.name, param, folder) for param, spec in planned}


def _publish(settled: Callable[[], Snapshot], path: Path, ranks: Ranks) -> None:
    """Make this rank's snapshot, once it is settled, a part of the checkpoint of all ranks."""
    with ranks.together():
        snapshot = settled()
    manifest = merged(ranks.gather(snapshot.manifest))
    mine = manifest.windows_of(ranks.rank)
    files = {
        mine[window]: file
        for window, file in snapshot.files.items()
        if manifest.windows[mine[window]].file  # else another rank's has the same
    }
    publish(Snapshot(manifest, files, directory=None), path, ranks)
