"""Give an optimizer state and hyperparameters that come from elsewhere."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.conversion import check_weights, report_conversions
from optstream.checkpoint.directory import open_checkpoint, verify
from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.match import check_class, check_groups, compare, fitting
from optstream.checkpoint.parts import Held
from optstream.checkpoint.snapshot import Snapshot
from optstream.distributed.placements import region_of
from optstream.errors import CheckpointError, RankError, WindowIOError
from optstream.layout import Shell, hyperparameters
from optstream.store.base import PIECE_BYTES
from optstream.streamed.given import gathers, held, own_part, same_windows, whole_specs
from optstream.streamed.state import StreamedState
from optstream.update import Record, working_copy

Groups = Sequence[Mapping[str, Any]]
States = Mapping[str, Mapping[str, Any] | None]
"""By parameter name."""
Shapes = Mapping[str, tuple[int, ...]]
_NONE: Shapes = {}


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
        together = self._state.ranks.together
        with together():
            with together():  # before weights are gathered: nobody shall wait there for a rank
                snapshot = open_checkpoint(path)
                manifest = snapshot.manifest
                check_class(source, manifest.optimizer, self._optimizer, strict)
                outlines = {name: snapshot.outline(name) for name in manifest.params}
                shapes = {name: param.shape for name, param in manifest.params.items()}
                given = self.check(source, manifest.groups, outlines, strict, shapes)
            check_weights(source, snapshot, self._split_weights(given, manifest), strict)
            if check:
                verify(snapshot, self._windows_needed(manifest))
        with self.on_all_ranks(source):
            if given.keys() != outlines.keys() or not self._adopt(source, snapshot):
                self._copy(source, snapshot, given, check=not check)
        return manifest.step

    def _copy(self, source: str, snapshot: Snapshot, given: States, check: bool) -> None:
        specs, stored = self._state.plan.params, snapshot.manifest.params
        params = {s.name: self._state.roster.param(i) for i, s in enumerate(specs)}
        regions = {name: region_of(name, param) for name, param in params.items()}
        gathering = {n for n, p in params.items() if n in given and gathers(p, stored[n])}
        with self._all_or_none(bool(gathering)):
            report_conversions(source, snapshot.manifest, specs, regions)
            if check:
                verify(snapshot, self._windows_needed(snapshot.manifest))
        folder, states = self._state.store.folder, {}
        for name in filter(given.__contains__, params):
            weight = held(name, params[name], stored[name])
            with self._all_or_none(name in gathering):
                states[name] = snapshot.state(name, weight, folder, regions[name])
        self.put(source, snapshot.manifest.groups, states)

    def _all_or_none(self, gathering: bool) -> contextlib.AbstractContextManager[None]:
        """Where weights are gathered, which all ranks know, let none wait there for a failed one.

        Elsewhere another rank may have taken files as they are and be through.
        """
        return self._state.ranks.together() if gathering else contextlib.nullcontext()

    def _windows_needed(self, manifest: Manifest) -> set[int]:
        """Return the windows of a checkpoint that hold what this rank keeps."""
        windows: set[int] = set()
        for index, spec in enumerate(self._state.plan.params):
            stored = manifest.params.get(spec.name)
            region = region_of(spec.name, self._state.roster.param(index))
            for tensor in stored.tensors.values() if stored else ():
                shards = [s for s in tensor.shards if tensor.is_whole or s.region.meets(region)]
                windows |= {piece.window for shard in shards for piece in shard.pieces}
        return windows

    @contextlib.contextmanager
    def on_all_ranks(self, source: str) -> Iterator[None]:
        """Replace the state in a block; where that fails on one rank, no rank goes on with it."""
        try:
            with self._state.ranks.together():
                yield
        except RankError:
            self._state.broken = self._state.broken or _broken(source)
            raise

    def _split_weights(self, given: States, manifest: Manifest) -> Iterator[tuple[str, Held]]:
        """Yield the parameters that split masters may belong to, with their names."""
        for index, spec in enumerate(self._state.plan.params):
            if spec.name in given and spec.dtype == torch.bfloat16 and spec.name in manifest.params:
                param = self._state.roster.param(index)
                yield spec.name, held(spec.name, param, manifest.params[spec.name])

    def check(
        self, source: str, groups: Groups, states: States, strict: bool, shapes: Shapes = _NONE
    ) -> States:
        """Hold given state against what the optimizer keeps; return what can be taken.

        Args:
            strict: it is an error unless that is all.
            shapes: of the parameters that the state was made for, where that is known.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        names = self._state.roster.group_names()
        check_groups(source, groups, names, strict)
        known = {name for group in names for name in group}
        self._state.extend({name for name, state in states.items() if state and name in known})
        elsewhere = self._state.roster.kept_elsewhere()
        mine = {name: state for name, state in states.items() if name not in elsewhere}
        differences = compare(whole_specs(self._state.roster), mine, list(known), shapes)
        differences.settle(source, strict)
        return {name: state for name, state in states.items() if name not in differences.unfit}

    def put(self, source: str, groups: Groups, states: States) -> None:
        """Replace all state and hyperparameters by given ones that were checked.

        Raises:
            CheckpointError: the optimizer refuses the hyperparameters, or tensors have other
                placements than its parameters; nothing was changed.
        """
        given = {}
        for index, spec in enumerate(self._state.plan.params):
            if state := states.get(spec.name):
                param = self._state.roster.param(index)
                given[index] = own_part(spec.name, param, fitting(spec, state))
        taken = self._of_today(source, groups, given)
        self._state.broken = _broken(source)
        self._state.put(given)
        self._take_groups(taken)
        self._state.broken = ""

    def _of_today(
        self, source: str, groups: Groups, given: Mapping[int, dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return param_groups to be: the given hyperparameters, and those of today beside them.

        The optimizer itself fills in what is new in its class, checks them, and brings given state
        of an older torch into today's form (step as a tensor).

        Raises:
            CheckpointError: it refuses; nothing was changed.
        """
        roster = self._state.roster
        taken = [
            {**live, **_values(source, index, live, values)}
            for index, (live, values) in enumerate(
                zip(self._optimizer.param_groups, groups, strict=True)
            )
        ]
        shell = Shell(self._optimizer, taken)
        state = defaultdict(dict, {roster.param(i): state for i, state in given.items()})
        try:
            shell.optimizer.__setstate__({"state": state, "param_groups": taken})
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            kind = type(self._optimizer).__qualname__
            raise CheckpointError(
                f"{source} does not fit this {kind}: {error or error!r}; nothing was changed"
            ) from error
        return shell.optimizer.param_groups

    def _take_groups(self, taken: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, taken, strict=True):
            before = dict(group)
            group.clear()
            group.update(values)
            group.update({k: before[k] for k in ("params", "param_names") if k in before})

    def _adopt(self, source: str, snapshot: Snapshot) -> bool:
        """Take a checkpoint's files as they are, if they are laid out like the plan.

        No bytes move: windows are read, and held against their digests, when they are next needed.
        """
        manifest, plan = snapshot.manifest, self._state.plan
        windows = same_windows(self._state.roster, manifest)
        if windows is None or snapshot.directory is None or manifest.piece_bytes != PIECE_BYTES:
            return False
        files = {mine: snapshot.files[stored] for mine, stored in windows.items()}
        taken = self._of_today(source, manifest.groups, {})
        with contextlib.suppress(WindowIOError):  # of the state that is about to go
            self._state.stream.drain()
        before, self._state.broken = self._state.broken, _broken(source)
        if not self._state.store.adopt(files):
            self._state.broken = before
            return False
        self._state.stream.replace(files)
        self._state.start_anew(
            {index: _record(snapshot, spec.name) for index, spec in enumerate(plan.params)}
        )
        self._take_groups(taken)
        self._state.broken = ""
        return True


def _broken(source: str) -> str:
    return f"loading {source} failed half-way; load it, or a checkpoint, again"


def _values(
    source: str, index: int, live: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return given hyperparameters for a group; what is a tensor stays on its device.

    Raises:
        CheckpointError: there are none, or one is of another kind than the group's own.
    """
    values = hyperparameters(given)
    if not values and hyperparameters(live):
        raise CheckpointError(f"{source} has no hyperparameters for param_groups[{index}]")
    for key, value in values.items():
        old = live.get(key)
        if isinstance(old, float | Tensor) and not isinstance(value, int | float | Tensor):
            raise CheckpointError(
                f"{source} has {key}={value!r} in param_groups[{index}], a number is needed"
            )
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            values[key] = value.to(old.device)
    return values


def _record(snapshot: Snapshot, name: str) -> Record:
    stored = snapshot.manifest.params[name]
    return Record(frozenset(stored.tensors), working_copy(stored.kept), dict(stored.unplanned))
