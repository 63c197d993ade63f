"""Run any torch optimizer on one window.

For a window the optimizer's `param_groups` hold only proxies of that window's parameters and its
`state` holds views into the window's buffer, or into scratch where it is encoded; then its own step
runs. A proxy of a float32 parameter shares the parameter's storage; the proxy of a bfloat16/float16
parameter is its float32 master, which is copied to the parameter afterwards.

What a parameter keeps in memory between steps (counters, Python values) changes only in `commit`,
when all windows are through: every tile of a parameter starts a step from the same values.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.bound import Bound
from optstream.distributed.shards import here
from optstream.errors import StateChangedError
from optstream.layout import (
    changed_values,
    copied_values,
    is_streamed,
    kept_value,
    step_on,
)
from optstream.memory import trim_heap
from optstream.plan import EXACT, MASTER, Plan, Temporaries, Window
from optstream.units import format_bytes
from optstream.update.record import Record, SharedRecords
from optstream.update.runs import TRIM_BYTES, Tile
from optstream.update.tiles import Tiles
from optstream.update.views import extent_view, given_part

log = logging.getLogger("optstream")


class Updater:
    """Updates windows of a plan with the wrapped optimizer.

    Ordering: `update` for each window in any order, then `commit` once. Until then a repeated
    `update` of a window that failed starts from the same counters.
    """

    def __init__(self, optimizer: Optimizer, seed: int = 0) -> None:
        """Take the optimizer that is wrapped, and the seed of random rounding."""
        self._optimizer = optimizer
        self.records: defaultdict[int, Record] = defaultdict(Record)
        self._tiles = Tiles(self.records, seed)
        self._next: dict[int, Record] = {}
        self._shared = SharedRecords()
        self._group_values: dict[int, dict[str, Any]] = {}
        self._attributes: dict[str, Any] = {}
        self._untrimmed_bytes = 0
        self.followed: set[str] = set()
        """Parameters whose weights something else changed since their last update."""

    def update(
        self, plan: Plan, window: Window, buffer: Tensor, bound: Mapping[int, Bound]
    ) -> None:
        """Update the parameters of a window that have gradients, and their state in `buffer`.

        Args:
            buffer: uint8, the window's data, on the device of its parameters.
            bound: by index in `plan.params`, those with a gradient.
        """
        for run in self._tiles.runs(plan, window, buffer, bound):
            self._run(run)
            if buffer.device.type == "cpu":
                self._trim_heap(run)

    def put(
        self,
        plan: Plan,
        window: Window,
        buffer: Tensor,
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Put given states, as a plain optimizer keeps them or Parted, into a window.

        Raises:
            StateChangedError: a tensor that does not fit what the optimizer keeps for its
            parameter.
        """
        for piece in window.pieces:
            if piece.param not in states:
                continue
            spec = plan.params[piece.param]
            wide = torch.float32 if spec.has_master else spec.dtype
            record = self._next.setdefault(piece.param, Record())
            extents = {extent.key: extent for extent in piece.extents}
            for key, value in states[piece.param].items():
                if key not in extents and not is_streamed(value):
                    record.kept[key] = kept_value(value, spec.dtype, wide)
                    continue
                part = given_part(value, piece)
                extent = extents.get(key)
                if extent is None or part.shape != extent.shape:
                    raise StateChangedError(
                        f"{spec.name}/{key} of shape {tuple(value.shape)} is not "
                        "what the optimizer keeps for this parameter; it cannot be streamed"
                    )
                if extent.codec == EXACT:
                    extent_view(buffer, extent).copy_(part)
                else:
                    self._tiles.put(plan, piece, extent, part, buffer)
                record.stored |= {key}

    @property
    def step(self) -> int:
        """Number of the step that is under way; random rounding depends on it."""
        return self._tiles.step

    @step.setter
    def step(self, number: int) -> None:
        self._tiles.step = number

    def reset(self) -> None:
        """Forget what parameters kept: all state is new, or about to be put."""
        self.records.clear()
        self._next, self._group_values, self._attributes = {}, {}, {}

    def commit(self, groups: Sequence[dict[str, Any]], advancing: Sequence[int] = ()) -> None:
        """Make the counters of this step the current ones.

        Args:
            groups: the public param_groups; values that the optimizer itself advances go there.
            advancing: groups whose values a step changes even where no parameter has a gradient.
        """
        idle = [index for index in advancing if index not in self._group_values]
        if idle:
            self._step_without_gradients(idle)
        for index, values in self._group_values.items():
            groups[index].update(values)
        vars(self._optimizer).update(self._attributes)
        self.records.update(self._next)
        self._group_values, self._attributes, self._next = {}, {}, {}
        self._shared.clear()
        self._name_followed()

    def _step_without_gradients(self, indices: Sequence[int]) -> None:
        groups = {index: self._window_group(index, []) for index in indices}
        for index, group in groups.items():
            if self._optimizer.param_groups[index]["params"]:  # some rules pass over empty groups
                group["params"] = [nn.Parameter(torch.empty(1, device="meta"))]
        with torch.no_grad():
            self._step_on(groups, defaultdict(dict))

    def _name_followed(self) -> None:
        all_changed = self._tiles.changed
        for device in {changed.device for _, changed in all_changed}:
            there = [(name, changed) for name, changed in all_changed if changed.device == device]
            # the only wait for an accelerator in a step, and one for all parameters
            flags = torch.stack([changed for _, changed in there]).tolist()
            self.followed |= {name for (name, _), flag in zip(there, flags, strict=True) if flag}
        all_changed.clear()

    def _run(self, tiles: Sequence[Tile]) -> None:
        by_group: dict[int, list[Tile]] = {}
        for tile in tiles:
            by_group.setdefault(tile.spec.group, []).append(tile)
        groups = {index: self._window_group(index, by_group[index]) for index in sorted(by_group)}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        state.update((tile.proxy, tile.state) for tile in tiles)
        self._step_on(groups, state)
        for tile in tiles:
            self._take_back(tile, state[tile.proxy])
            tile.state.clear()  # new state is in the window now

    def _trim_heap(self, run: Sequence[Tile]) -> None:
        """Give back freed temporaries: glibc keeps them, and small blocks between them pile up."""
        for tile in run:
            if tile.makes_state or tile.spec.temporaries is not Temporaries.NONE:
                self._untrimmed_bytes += tile.proxy.nbytes
        if self._untrimmed_bytes >= TRIM_BYTES:
            trim_heap()
            self._untrimmed_bytes = 0

    def _window_group(self, index: int, tiles: Sequence[Tile]) -> dict[str, Any]:
        public = self._optimizer.param_groups[index]
        group = {**copied_values(public), "params": [tile.proxy for tile in tiles]}
        if "param_names" in public:
            group["param_names"] = [public["param_names"][tile.spec.position] for tile in tiles]
        return group

    def _step_on(
        self, groups: Mapping[int, dict[str, Any]], state: defaultdict[Tensor, Any]
    ) -> None:
        """Step on these groups; what it changes besides parameters and state waits for `commit`."""
        self._attributes = step_on(self._optimizer, list(groups.values()), state)
        for index, group in groups.items():
            self._group_values[index] = changed_values(self._optimizer.param_groups[index], group)

    def _take_back(self, tile: Tile, state: Mapping[str, Any]) -> None:
        """Put what the optimizer left into the window, the record and the parameter."""
        stored = {MASTER} if tile.spec.has_master else set()
        kept: dict[str, Any] = {}
        unplanned: dict[str, Tensor] = {}
        for key, value in state.items():
            view = tile.views.get(key)
            if view is not None and _is_put(here(value), view):
                stored.add(key)
            elif is_streamed(value):
                unplanned[key] = value
            else:
                kept[key] = value
        self._record(tile, frozenset(stored), kept, unplanned)
        if tile.spec.has_master:
            tile.target.copy_(tile.views[MASTER])
        if tile.decoded:
            self._tiles.store(tile, stored)

    def _record(
        self,
        tile: Tile,
        stored: frozenset[str],
        kept: dict[str, Any],
        unplanned: dict[str, Tensor],
    ) -> None:
        """Note what a parameter keeps, beside what was noted for its tiles before this one."""
        record = Record(stored, kept, {tile.start: unplanned} if unplanned else {})
        earlier = self._next.get(tile.param)
        if earlier is not None:
            record.kept = {**earlier.kept, **kept}
            record.unplanned = {**earlier.unplanned, **record.unplanned}
        self._next[tile.param] = self._shared.share(record)
        for key, value in unplanned.items():
            self._report_unplanned(tile, key, value)

    def _report_unplanned(self, tile: Tile, key: str, value: Tensor) -> None:
        log.warning(
            "%s/%s (%s) was not foreseen when the optimizer was wrapped and stays in memory: a "
            "hyperparameter that adds state was changed since; wrap the optimizer again",
            tile.spec.name,
            key,
            format_bytes(value.nbytes),
        )


def _is_put(value: object, view: Tensor) -> bool:
    """Put what the optimizer left into its view; tell whether it fits there."""
    if value is view:
        return True
    if not isinstance(value, Tensor) or value.shape != view.shape or value.dtype != view.dtype:
        return False
    if value.data_ptr() != view.data_ptr():
        view.copy_(value)
    return True
