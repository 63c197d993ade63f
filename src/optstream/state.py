"""The state of one optimizer: the plan of it, the store that holds it, the stream that moves it.

Everything that brings windows in goes through `_windows`: a step updates them, a load fills them. A
snapshot freezes what the store holds and keeps a copy of what is in memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.checkpoint.manifest import (
    Manifest,
    StoredParam,
    StoredPiece,
    StoredTensor,
    StoredWindow,
)
from optstream.checkpoint.snapshot import Snapshot
from optstream.codecs import CodecChoice
from optstream.errors import ModelChangedError, StateChangedError, WindowIOError
from optstream.headers import window_files
from optstream.params import Bound, Describer, bind, parameter_names, unplanned
from optstream.plan import ParamSpec, Piece, Plan
from optstream.ram import Ram
from optstream.store.base import PIECE_BYTES, Store
from optstream.stream import Stream
from optstream.units import format_bytes
from optstream.update import Record, Updater, stored_values, working_copy

log = logging.getLogger("optstream")
States = Mapping[int, Mapping[str, Any]]
"""Of parameters by their index in `Plan.params`: tensors and values by the optimizer's own keys."""


class StreamedState:
    """What the wrapped optimizer would keep in memory.

    Attributes:
        plan: windows and their cost.
        update_s: running total of seconds in updates.
        num_left: windows that a step which failed has not updated.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        io_threads: int,
        window_bytes: int,
        ram: Ram,
        master_weights: bool,
        model: nn.Module | None,
        codecs: CodecChoice,
        codec_seed: int,
    ) -> None:
        self.plan = Plan(window_bytes)
        self.update_s = 0.0
        self.num_left = 0
        self.stream = Stream(store, io_threads)
        self._optimizer = optimizer
        self._store = store
        self._ram = ram
        self._describer = Describer(optimizer, master_weights, codecs=codecs)
        self._codecs = codecs
        self._names = parameter_names(optimizer.param_groups, model)
        self._places: defaultdict[int, list[tuple[int, Piece]]] = defaultdict(list)
        self._updater = Updater(optimizer, codec_seed)
        self._backwards = False
        self._done: set[int] = set()

    # -- parameters ----------------------------------------------

    def extend(self, with_state: Collection[str] = ()) -> None:
        """Give every parameter that trains a place in the plan and in the store.

        Args:
            with_state: names of parameters that get one in any case: frozen ones that once trained.

        Raises:
            StoreError: the store, or memory, cannot hold it; nothing was changed.
        """
        groups = self._optimizer.param_groups
        state: dict[Tensor, Any] = dict(self._optimizer.state)
        for g, group in enumerate(groups):
            for position, param in enumerate(group["params"] if with_state else ()):
                if self.name(g, position) in with_state:
                    state[param] = True
        new = [
            self._describer.describe(self.name(group, position), group, position)
            for group, position in unplanned(self.plan.params, groups, state)
        ]
        if not new:
            return
        if not self.plan.params:
            self._codecs.check_used()
        plan = self._extended(new)
        self.stream.extend(plan, window_files(plan, self.plan.num_windows))
        for window in range(self.plan.num_windows, plan.num_windows):
            for piece in plan.windows[window].pieces:
                self._places[piece.param].append((window, piece))
        self.plan = plan
        log.info(
            "%s: %d windows, %s of state, %d of them (%s) resident, at most %s of host memory",
            type(self._optimizer).__name__,
            plan.num_windows,
            format_bytes(plan.state_bytes),
            plan.num_resident,
            format_bytes(plan.resident_bytes),
            format_bytes(plan.peak_host_bytes),
        )

    def _extended(self, new: Sequence[ParamSpec]) -> Plan:
        plan = self.plan.extended(new)
        if self._store.in_place:
            return plan.with_resident(plan.data_bytes)
        return self._ram.keep_in(plan, self.plan.peak_host_bytes if self.plan.windows else 0)

    def name_new_parameters(self) -> None:
        """Name parameters of groups that were added since."""
        self._names = parameter_names(self._optimizer.param_groups, None) | self._names

    def name(self, group: int, position: int) -> str:
        """Return the name of `param_groups[group]["params"][position]`."""
        param = self._optimizer.param_groups[group]["params"][position]
        return self._names.get(id(param), f"group{group}.param{position}")

    def param(self, index: int) -> Tensor:
        """Return today's parameter of an index in the plan."""
        spec = self.plan.params[index]
        return self._optimizer.param_groups[spec.group]["params"][spec.position]  # type: ignore[no-any-return]

    # -- the step ----------------------------------------------

    def step(self) -> int:
        """Update every parameter with a gradient; return the number of windows.

        A step that failed goes on where it stopped: windows it has updated are left alone.
        """
        bound = bind(self.plan.params, self._optimizer.param_groups)
        order = self._order(bound)
        left = [window for window in order if window not in self._done]
        self.num_left = len(left)
        with self._windows(left, bound) as windows:
            for window, data in windows:
                start = time.perf_counter()
                self._updater.update(self.plan, self.plan.windows[window], data, bound)
                self.update_s += time.perf_counter() - start
                self._done.add(window)
                self.num_left -= 1
        self._finish(order)
        return len(order)

    @property
    def num_updated(self) -> int:
        """Windows that a step, which then failed, has updated; 0 between steps."""
        return len(self._done)

    def tensors_at(self, error: WindowIOError) -> list[str]:
        """Return "name/key" of the state that a failed transfer of a window was to move."""
        if error.window is None:
            return []
        start = error.offset - len(self._store.file(error.window).header)
        return [
            f"{self.plan.params[piece.param].name}/{extent.key}"
            for piece in self.plan.windows[error.window].pieces
            for extent in piece.extents
            if extent.offset < start + error.num_bytes and start < extent.offset + extent.num_bytes
        ]

    def _finish(self, order: Sequence[int]) -> None:
        groups = self._optimizer.param_groups
        advancing = range(len(groups)) if self._describer.advances_groups else ()
        self._updater.commit(groups, advancing)
        self._done = set()
        # a scheduler made before wrapping looks there and warns of a wrong order otherwise
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if order:
            self._backwards = not self._backwards
        if self._updater.followed:
            names = sorted(self._updater.followed)
            log.info(
                "%d parameters (%s, ...) were written by something else since the last step: "
                "their masters follow",
                len(names),
                names[0],
            )
            self._updater.followed.clear()

    # -- looking at it ----------------------------------------------

    def with_state(self) -> list[int]:
        """Return the indices of parameters that have state, in the order of the groups."""
        records = self._updater.records
        indices = [i for i, record in records.items() if record.stored or record.kept]
        return sorted(
            indices, key=lambda i: (self.plan.params[i].group, self.plan.params[i].position)
        )

    def keys(self, index: int) -> list[str]:
        """Return the keys of a parameter's state."""
        record = self._updater.records[index]
        streamed = [state.key for state in self.plan.params[index].states]
        return [*record.kept, *(key for key in streamed if key in record.stored)]

    def look(self, index: int, key: str) -> Any:
        """Return a copy of one value of a parameter's state."""
        record = self._updater.records[index]
        if key in record.kept:
            return working_copy({key: record.kept[key]})[key]
        if key not in record.stored:
            raise KeyError(key)
        state = next(state for state in self.plan.params[index].states if state.key == key)
        flat = torch.empty(math.prod(state.shape), dtype=state.dtype)
        for window, piece in self._places[index]:
            extent = piece.extent(key)
            data = self.stream.look(window, extent.offset, extent.num_bytes)
            values = stored_values(data, extent, piece, self.param(index))
            flat[piece.start : piece.start + extent.numel] = values
        return flat.as_strided(state.shape, state.stride)

    # -- state from elsewhere ----------------------------------------------

    def put(self, states: States) -> None:
        """Replace all state; parameters that are not in `states` start anew.

        Raises:
            StateChangedError: a tensor that does not fit what the optimizer keeps.
            WindowIOError: the store; the state is then neither the old nor the new one.
        """
        bound = {index: Bound(self.param(index), self.param(index)) for index in states}
        order = self._order(bound)
        self._start_anew()
        self.stream.replace(())
        with self._windows(order, bound) as windows:
            for window, data in windows:
                self._updater.put(self.plan, self.plan.windows[window], data, states)
        self._updater.commit(self._optimizer.param_groups)
        self.stream.drain()

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take a checkpoint's files as they are, if they are laid out like this plan.

        No bytes move: windows are read, and held against their digests, when they are next needed.
        """
        manifest, directory = snapshot.manifest, snapshot.directory
        if directory is None or manifest.piece_bytes != PIECE_BYTES:
            return False
        if len(manifest.windows) != self.plan.num_windows:
            return False
        if set(manifest.params) < {spec.name for spec in self.plan.params}:
            return False
        with contextlib.suppress(WindowIOError):  # of the state that is about to go
            self.stream.drain()
        files = {
            window: (directory / manifest.windows[window].file, file.digests)
            for window, file in snapshot.files.items()
        }
        if not self._store.adopt(files):
            return False
        self.stream.replace(files)
        self._start_anew()
        for index, spec in enumerate(self.plan.params):
            stored = manifest.params[spec.name]
            self._updater.records[index] = Record(
                frozenset(stored.tensors), working_copy(stored.kept), dict(stored.unplanned)
            )
        return True

    def _start_anew(self) -> None:
        """Forget what is in memory, and a step that failed half-way."""
        self._updater.reset()
        self._done, self.num_left = set(), 0

    def snapshot(self, step: int) -> Snapshot:
        """Freeze all state as it is now; the next write of each window goes to a fresh file.

        Raises:
            OutOfSpaceError: no space for those writes; nothing was frozen.
            StateChangedError: a step failed half-way.
        """
        if self.num_updated:
            raise StateChangedError(
                f"a step failed after {self.num_updated} windows; call step() again with the same "
                "gradients to finish it, or load a checkpoint"
            )
        files = self.stream.freeze()
        names = [spec.name for spec in self.plan.params]
        assert len(set(names)) == len(names)
        kind = type(self._optimizer)
        manifest = Manifest(
            optimizer=f"{kind.__module__}.{kind.__qualname__}",
            step=step,
            world_size=1,
            piece_bytes=PIECE_BYTES,
            groups=tuple(self._stored_groups()),
            params=dict(self._stored_params()),
            windows=tuple(
                StoredWindow(
                    file=f"rank00000/window{window:05d}.safetensors" if window in files else "",
                    header_bytes=files[window].header_bytes if window in files else 0,
                    data_bytes=self.plan.windows[window].data_bytes,
                    digests=files[window].ordered_digests() if window in files else (),
                )
                for window in range(self.plan.num_windows)
            ),
        )
        return Snapshot(manifest, files, directory=None)

    def _stored_groups(self) -> Iterator[dict[str, Any]]:
        for g, group in enumerate(self._optimizer.param_groups):
            names = [self.name(g, position) for position in range(len(group["params"]))]
            values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            yield {**working_copy(values), "params": names}

    def _stored_params(self) -> Iterator[tuple[str, StoredParam]]:
        planned = {(spec.group, spec.position): i for i, spec in enumerate(self.plan.params)}
        for g, group in enumerate(self._optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                index = planned.get((g, position))
                name, shape = self.name(g, position), tuple(param.shape)
                if index is None:
                    yield name, StoredParam(shape, param.dtype, {})
                    continue
                record, spec = self._updater.records[index], self.plan.params[index]
                tensors = {
                    state.key: StoredTensor(
                        state.dtype,
                        state.shape,
                        state.stride,
                        tuple(self._stored_pieces(index, state.key)),
                    )
                    for state in spec.states
                    if state.key in record.stored
                }
                kept = working_copy(record.kept)
                yield name, StoredParam(shape, spec.dtype, tensors, kept, dict(record.unplanned))

    def _stored_pieces(self, index: int, key: str) -> Iterator[StoredPiece]:
        for window, piece in self._places[index]:
            extent = piece.extent(key)
            yield StoredPiece(window, extent.offset, piece.start, extent.numel)

    def bytes_off(self, directory: Path) -> int:
        """Return the bytes of windows that cannot be linked into a directory: other drives'."""
        device = directory.stat().st_dev
        windows = range(self.plan.num_windows)
        away = [window for window in windows if self._store.device(window) != device]
        return sum(self._store.file(window).file_bytes for window in away)

    # -- windows ----------------------------------------------

    @contextlib.contextmanager
    def _windows(
        self, order: Sequence[int], bound: Mapping[int, Bound]
    ) -> Iterator[Iterator[tuple[int, Tensor]]]:
        devices = {window: self._device(window, bound) for window in order}
        with torch.no_grad(), contextlib.closing(self.stream.windows(order, devices)) as windows:
            yield windows

    def _order(self, bound: Mapping[int, Bound]) -> list[int]:
        """Return the windows with gradients; every other scan goes backwards from the last one."""
        active = [
            index
            for index, window in enumerate(self.plan.windows)
            if any(piece.param in bound for piece in window.pieces)
        ]
        return active[::-1] if self._backwards else active

    def _device(self, window: int, bound: Mapping[int, Bound]) -> torch.device:
        pieces = [piece for piece in self.plan.windows[window].pieces if piece.param in bound]
        devices = {bound[piece.param].param.device for piece in pieces}
        if len(devices) != 1:
            name = self.plan.params[pieces[0].param].name
            raise ModelChangedError(
                f"the parameters of the window of {name} are on {sorted(map(str, devices))}, they "
                "were on one device when the optimizer was wrapped; wrap it after moving the model"
            )
        return devices.pop()
