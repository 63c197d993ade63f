"""Give an optimizer state and hyperparameters that come from elsewhere."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.directory import open_checkpoint, verify
from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.match import check_class, check_groups, check_shapes, compare, fitting
from optstream.checkpoint.snapshot import Snapshot
from optstream.errors import RankError, WindowIOError
from optstream.layout import hyperparameters
from optstream.state import StreamedState
from optstream.store.base import PIECE_BYTES
from optstream.update import Record, working_copy


class Loader:
    """Checks what is given as a whole, then puts it."""

    def __init__(self, optimizer: Optimizer, state: StreamedState) -> None:
        self._optimizer = optimizer
        self._state = state

    def load(self, path: Path, *, strict: bool, check: bool) -> int:
        """Take a checkpoint's state; return how many steps it has done.

        Raises:
            CheckpointError: not a whole checkpoint, or it does not fit; nothing was changed.
            WindowReadError: bytes are not what was written.
        """
        source = f"checkpoint {path}"
        with self._state.ranks.together():
            snapshot = open_checkpoint(path.absolute())
            manifest = snapshot.manifest
            check_class(source, manifest.optimizer, self._optimizer, strict)
            states = {name: snapshot.state(name) for name in manifest.params}
            self.check(source, manifest.groups, states, strict)
            shapes = {name: param.shape for name, param in manifest.params.items()}
            check_shapes(source, shapes, self._state.plan.params)
            if check:
                verify(snapshot, self._windows_needed(manifest))
        with self.on_all_ranks(source):
            if not self._adopt(snapshot):
                if not check:
                    verify(snapshot, self._windows_needed(manifest))
                self.put(source, manifest.groups, states)
        return manifest.step

    def _windows_needed(self, manifest: Manifest) -> set[int]:
        """Return the windows of a checkpoint that hold what this rank keeps."""
        stored = (manifest.params.get(spec.name) for spec in self._state.plan.params)
        return {
            piece.window
            for param in stored
            if param is not None
            for tensor in param.tensors.values()
            for piece in tensor.pieces
        }

    @contextlib.contextmanager
    def on_all_ranks(self, source: str) -> Iterator[None]:
        """Replace the state in a block; where that fails on one rank, no rank goes on with it."""
        try:
            with self._state.ranks.together():
                yield
        except RankError:
            self._state.broken = self._state.broken or _broken(source)
            raise

    def check(
        self,
        source: str,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any] | None],
        strict: bool,
    ) -> None:
        """Hold given state against what the optimizer keeps.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        names = self._state.roster.group_names()
        check_groups(source, groups, names)
        self._state.extend({name for name, state in states.items() if state})
        known = [name for group in names for name in group]
        elsewhere = self._state.roster.kept_elsewhere()
        mine = {name: state for name, state in states.items() if name not in elsewhere}
        compare(self._state.plan.params, mine, known).settle(source, strict)

    def put(
        self,
        source: str,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        """Replace all state and hyperparameters by given ones that were checked."""
        specs = enumerate(self._state.plan.params)
        given = {i: fitting(spec, state) for i, spec in specs if (state := states.get(spec.name))}
        self._of_today(given)
        self._state.broken = _broken(source)
        self._state.put(given)
        self._set_groups(groups)
        self._state.broken = ""

    def _of_today(self, given: Mapping[int, dict[str, Any]]) -> None:
        """Let the optimizer bring state of an older torch into today's form (step as a tensor)."""
        roster = self._state.roster
        state = defaultdict(dict, {roster.param(i): state for i, state in given.items()})
        self._optimizer.__setstate__({"state": state})
        self._optimizer.state = defaultdict(dict)

    def _set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyperparameters; what is a tensor stays on its device."""
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            before = dict(group)
            group.clear()
            for key, value in hyperparameters(values).items():
                old = before.get(key)
                if isinstance(value, Tensor) and isinstance(old, Tensor):
                    value = value.to(old.device)
                group[key] = value
            group.update({k: before[k] for k in ("params", "param_names") if k in before})
        # fills what a state_dict of an older torch lacks
        self._optimizer.__setstate__({"param_groups": self._optimizer.param_groups})

    def _adopt(self, snapshot: Snapshot) -> bool:
        """Take a checkpoint's files as they are, if they are laid out like the plan.

        No bytes move: windows are read, and held against their digests, when they are next needed.
        """
        manifest, plan = snapshot.manifest, self._state.plan
        names = {spec.name for spec in plan.params}
        if not self._is_laid_out(snapshot) or set(manifest.params) < names:
            return False
        with contextlib.suppress(WindowIOError):  # of the state that is about to go
            self._state.stream.drain()
        assert snapshot.directory is not None
        mine = manifest.windows_of(self._state.ranks.rank)
        files = {
            window - mine.start: (snapshot.directory / manifest.windows[window].file, file.digests)
            for window, file in snapshot.files.items()
            if window in mine
        }
        if not self._state.store.adopt(files):
            return False
        self._state.stream.replace(files)
        self._state.start_anew(
            {index: _record(snapshot, spec.name) for index, spec in enumerate(plan.params)}
        )
        self._set_groups(manifest.groups)
        self._state.broken = ""
        return True

    def _is_laid_out(self, snapshot: Snapshot) -> bool:
        manifest = snapshot.manifest
        return (
            snapshot.directory is not None
            and manifest.piece_bytes == PIECE_BYTES
            and manifest.world_size == self._state.ranks.size
            and len(manifest.windows_of(self._state.ranks.rank)) == self._state.plan.num_windows
        )


def _broken(source: str) -> str:
    return f"loading {source} failed half-way; load it, or a checkpoint, again"


def _record(snapshot: Snapshot, name: str) -> Record:
    stored = snapshot.manifest.params[name]
    return Record(frozenset(stored.tensors), working_copy(stored.kept), dict(stored.unplanned))
