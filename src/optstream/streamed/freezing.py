"""Freeze the state of an optimizer: what is where, and the files that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from optstream.checkpoint.manifest import (
    Manifest,
    StoredParam,
    StoredShard,
    StoredTensor,
    StoredWindow,
)
from optstream.checkpoint.snapshot import Snapshot
from optstream.distributed.placements import region_of
from optstream.distributed.region import Region
from optstream.errors import StateChangedError
from optstream.layout import hyperparameters
from optstream.plan import StateTensor
from optstream.store.base import PIECE_BYTES, FrozenFile
from optstream.streamed.given import check_shards
from optstream.streamed.state import StreamedState
from optstream.update import working_copy


class Freezer:
    """Makes snapshots of what one rank keeps."""

    def __init__(self, optimizer: Optimizer, state: StreamedState) -> None:
        self._optimizer = optimizer
        self._state = state

    def snapshot(self, step: int) -> Snapshot:
        """Freeze all state as it is now, and wait until all of it is in files, see `freeze`."""
        return self.freeze(step)()

    def freeze(self, step: int, *, room: bool = True) -> Callable[[], Snapshot]:
        """Freeze all state as it is now; the next write of each window goes to a fresh file.

        Args:
            room: False reserves no files for those writes: drop the snapshot before them.

        Returns:
            A function that waits for the writes under way and returns the snapshot; any thread may
            call it. It raises WindowWriteError if one was refused and memory cannot hold a copy.

        Raises:
            OutOfSpaceError: no space for those writes; nothing was frozen.
            StateChangedError: a step failed half-way.
            CheckpointError: a shard that is not where its placements say.
        """
        state = self._state
        if state.num_updated:
            raise StateChangedError(
                f"a step failed after {state.num_updated} windows; call step() again with the same "
                "gradients to finish it, or load a checkpoint"
            )
        frozen, plan = state.stream.freeze(room=room), state.plan
        names = [spec.name for spec in plan.params]
        assert len(set(names)) == len(names)
        kind = type(self._optimizer)
        manifest = Manifest(
            optimizer=f"{kind.__module__}.{kind.__qualname__}",
            step=step,
            rank_windows=(plan.num_windows,),
            piece_bytes=PIECE_BYTES,
            groups=tuple(self._groups()),
            params=dict(self._params()),
            windows=(),
        )

        def settled() -> Snapshot:
            files = frozen.settled()
            windows = [
                self._window(index, window.data_bytes, files.get(index))
                for index, window in enumerate(plan.windows)
            ]
            return Snapshot(replace(manifest, windows=tuple(windows)), files, directory=None)

        return settled

    def _window(self, window: int, data_bytes: int, file: FrozenFile | None) -> StoredWindow:
        if file is None:
            return StoredWindow("", 0, data_bytes, ())
        name = f"rank{self._state.ranks.rank:05d}/window{window:05d}.safetensors"
        return StoredWindow(name, file.header_bytes, data_bytes, file.ordered_digests())

    def _groups(self) -> Iterator[dict[str, Any]]:
        for group, names in zip(
            self._optimizer.param_groups, self._state.roster.group_names(), strict=True
        ):
            yield {**working_copy(hyperparameters(group)), "params": names}

    def _params(self) -> Iterator[tuple[str, StoredParam]]:
        specs = self._state.plan.params
        planned = {(spec.group, spec.position): i for i, spec in enumerate(specs)}
        for g, group in enumerate(self._optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                name, index = self._state.roster.name(g, position), planned.get((g, position))
                if index is None:
                    yield name, StoredParam(tuple(param.shape), param.dtype, {})
                else:
                    yield name, self._param(index)

    def _param(self, index: int) -> StoredParam:
        record, spec = self._state.records[index], self._state.plan.params[index]
        param = self._state.roster.param(index)
        region = region_of(spec.name, param)
        if region != Region.whole(param.shape):
            check_shards(spec, record)
        tensors = {
            state.key: self._tensor(index, state, tuple(param.shape), region)
            for state in spec.states
            if state.key in record.stored
        }
        kept, unplanned = working_copy(record.kept), dict(record.unplanned)
        return StoredParam(tuple(param.shape), spec.dtype, tensors, kept, unplanned)

    def _tensor(
        self, index: int, state: StateTensor, shape: tuple[int, ...], region: Region
    ) -> StoredTensor:
        pieces = tuple(self._state.roster.stored_pieces(index, state.key))
        if region == Region.whole(shape):
            shards = (StoredShard(Region.whole(state.shape), pieces),)
            return StoredTensor(state.dtype, state.shape, state.stride, shards, state.codec)
        shards = (StoredShard(region, pieces),)
        return StoredTensor(state.dtype, shape, None, shards, state.codec)

    def bytes_off(self, directory: Path) -> int:
        """Return the bytes of windows that cannot be linked into a directory: other drives'."""
        device = directory.stat().st_dev
        store = self._state.store
        windows = range(self._state.plan.num_windows)
        away = [window for window in windows if store.device(window) != device]
        return sum(store.file(window).file_bytes for window in away)

    @property
    def file_bytes(self) -> int:
        """Bytes of all windows' files."""
        store, windows = self._state.store, range(self._state.plan.num_windows)
        return sum(store.file(window).file_bytes for window in windows)
