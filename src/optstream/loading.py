"""Give an optimizer state and hyperparameters that come from elsewhere."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.directory import open_checkpoint, verify
from optstream.checkpoint.match import check_class, check_groups, check_shapes, compare, fitting
from optstream.checkpoint.snapshot import Snapshot
from optstream.errors import WindowIOError
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
        snapshot = open_checkpoint(path.absolute())
        manifest, source = snapshot.manifest, f"checkpoint {path}"
        check_class(source, manifest.optimizer, self._optimizer, strict)
        states = {name: snapshot.state(name) for name in manifest.params}
        self.check(source, manifest.groups, states, strict)
        shapes = {name: param.shape for name, param in manifest.params.items()}
        check_shapes(source, shapes, self._state.plan.params)
        if check:
            verify(snapshot)
        if not self._adopt(snapshot):
            if not check:
                verify(snapshot)
            self.put(source, manifest.groups, states)
        return manifest.step

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
        self._state.roster.check_whole(source)
        known = [name for group in names for name in group]
        compare(self._state.plan.params, states, known).settle(source, strict)

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
        self._state.broken = f"loading {source} failed half-way; load it, or a checkpoint, again"
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
        files = {
            window: (snapshot.directory / manifest.windows[window].file, file.digests)
            for window, file in snapshot.files.items()
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
            and len(manifest.windows) == self._state.plan.num_windows
        )


def _record(snapshot: Snapshot, name: str) -> Record:
    stored = snapshot.manifest.params[name]
    return Record(frozenset(stored.tensors), working_copy(stored.kept), dict(stored.unplanned))
