"""Run any torch optimizer on one window.

For a window the optimizer's `param_groups` hold only proxies of that window's parameters and its
`state` holds views into the window's buffer; then its own step runs. A proxy of a float32 parameter
shares the parameter's storage; the proxy of a bfloat16/float16 parameter is its float32 master in
the buffer, which is copied to the parameter afterwards.

What a parameter keeps in memory between steps (counters, Python values) changes only in `commit`,
when all windows are through: every tile of a parameter starts a step from the same values.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.errors import StateChangedError
from optstream.layout import (
    changed_values,
    copied_values,
    is_streamed,
    kept_value,
    step_on,
)
from optstream.memory import trim_heap
from optstream.params import Bound
from optstream.plan import MASTER, ParamSpec, Piece, Plan, Temporaries, Window
from optstream.units import format_bytes
from optstream.update.master import follow_parameter
from optstream.update.record import Record, working_copy
from optstream.update.views import GradientScratch, extent_view, part_of

TRIM_BYTES = 4 * 2**20
"""Of parameters updated by rules with temporaries, after which freed memory is given back."""

log = logging.getLogger("optstream")


@dataclass(eq=False)
class _Job:
    """A tile of a piece (`start`: in the flat parameter), ready for the optimizer."""

    spec: ParamSpec
    param: int
    start: int
    target: Tensor
    proxy: nn.Parameter
    state: dict[str, Any]
    views: dict[str, Tensor]


class Updater:
    """Updates windows of a plan with the wrapped optimizer.

    Ordering: `update` for each window in any order, then `commit` once. Until then a repeated
    `update` of a window that failed starts from the same counters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.records: defaultdict[int, Record] = defaultdict(Record)
        self._next: dict[int, Record] = {}
        self._group_values: dict[int, dict[str, Any]] = {}
        self._attributes: dict[str, Any] = {}
        self._scratch = GradientScratch()
        self._untrimmed_bytes = 0
        self._changed: list[tuple[str, Tensor]] = []
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
        scratch = self._scratch.spaces(plan, window, bound)
        jobs = [
            job
            for piece in window.pieces
            if piece.param in bound
            for job in self._jobs(
                plan.params[piece.param], piece, buffer, bound[piece.param], scratch
            )
        ]
        # new state is made by the optimizer itself: one piece at a time keeps that within the bound
        first = [job for job in jobs if self._makes_state(job)]
        rest = [job for job in jobs if not self._makes_state(job)]
        for run in (*([job] for job in first), *_runs(rest)):
            self._run(run)
            if buffer.device.type == "cpu":
                self._trim_heap(run)

    def put(
        self,
        params: Sequence[ParamSpec],
        window: Window,
        buffer: Tensor,
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Put given states, as a plain optimizer keeps them, into a window.

        Raises:
            StateChangedError: a tensor that does not fit what the optimizer keeps for its
            parameter.
        """
        for piece in window.pieces:
            if piece.param not in states:
                continue
            spec = params[piece.param]
            wide = torch.float32 if spec.has_master else spec.dtype
            record = self._next.setdefault(piece.param, Record())
            views = {extent.key: extent_view(buffer, extent) for extent in piece.extents}
            for key, value in states[piece.param].items():
                if key not in views and not is_streamed(value):
                    record.kept[key] = kept_value(value, spec.dtype, wide)
                    continue
                part = part_of(value.detach(), piece)
                if key not in views or part.shape != views[key].shape:
                    raise StateChangedError(
                        f"{spec.name}/{key} of shape {tuple(value.shape)} is not "
                        "what the optimizer keeps for this parameter; it cannot be streamed"
                    )
                views[key].copy_(part)
                record.stored |= {key}

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
        self._name_followed()

    def _step_without_gradients(self, indices: Sequence[int]) -> None:
        groups = {index: self._window_group(index, []) for index in indices}
        for group in groups.values():
            group["params"] = [nn.Parameter(torch.empty(1, device="meta"))]
        with torch.no_grad():
            self._step_on(groups, defaultdict(dict))

    def _name_followed(self) -> None:
        for device in {changed.device for _, changed in self._changed}:
            there = [(name, changed) for name, changed in self._changed if changed.device == device]
            # the only wait for an accelerator in a step, and one for all parameters
            flags = torch.stack([changed for _, changed in there]).tolist()
            self.followed |= {name for (name, _), flag in zip(there, flags, strict=True) if flag}
        self._changed = []

    def _jobs(
        self, spec: ParamSpec, piece: Piece, buffer: Tensor, bound: Bound, scratch: Iterator[Tensor]
    ) -> Iterator[_Job]:
        views = {extent.key: extent_view(buffer, extent) for extent in piece.extents}
        target = part_of(bound.param.detach(), piece)
        grad = part_of(bound.grad.detach(), piece)
        if spec.has_master:
            self._load_master(spec, self.records[piece.param], views[MASTER], target)
            wide = next(scratch)[: piece.numel].as_strided(target.shape, views[MASTER].stride())
            grad = wide.copy_(grad)
        attributes = vars(bound.param)
        if piece.numel <= spec.max_tile:
            yield self._job(spec, piece, 0, target, grad, views, attributes)
            return
        for start in range(0, piece.numel, spec.max_tile):
            tile = slice(start, start + spec.max_tile)
            of_tile = {key: view[tile] for key, view in views.items()}
            yield self._job(spec, piece, start, target[tile], grad[tile], of_tile, attributes)

    def _job(
        self,
        spec: ParamSpec,
        piece: Piece,
        start: int,
        target: Tensor,
        grad: Tensor,
        views: dict[str, Tensor],
        attributes: Mapping[str, Any],
    ) -> _Job:
        record = self.records[piece.param]
        proxy = nn.Parameter(views[MASTER] if spec.has_master else target, requires_grad=True)
        vars(proxy).update(attributes)  # rules ask parameters what they are (tensor parallel, QKV)
        proxy.grad = grad
        state = working_copy(record.kept)
        state.update(record.unplanned.get(piece.start + start, {}))
        state.update({key: views[key] for key in views if key in record.stored and key != MASTER})
        return _Job(spec, piece.param, piece.start + start, target, proxy, state, views)

    def _load_master(self, spec: ParamSpec, record: Record, master: Tensor, param: Tensor) -> None:
        if MASTER not in record.stored:
            master.copy_(param)
            return
        changed = follow_parameter(master, param)
        if not changed.is_cpu or bool(changed):
            self._changed.append((spec.name, changed))

    def _makes_state(self, job: _Job) -> bool:
        stored = self.records[job.param].stored
        return any(key != MASTER for key in job.views) and not stored - {MASTER}

    def _run(self, jobs: Sequence[_Job]) -> None:
        by_group: dict[int, list[_Job]] = {}
        for job in jobs:
            by_group.setdefault(job.spec.group, []).append(job)
        groups = {index: self._window_group(index, by_group[index]) for index in sorted(by_group)}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        state.update({job.proxy: job.state for job in jobs})
        self._step_on(groups, state)
        for job in jobs:
            self._take_back(job, state[job.proxy])
            job.state.clear()  # new state is in the window now

    def _trim_heap(self, run: Sequence[_Job]) -> None:
        """Give back freed temporaries: glibc keeps them, and small blocks between them pile up."""
        first = any(self._makes_state(job) for job in run)
        self._untrimmed_bytes += sum(
            job.proxy.nbytes for job in run if first or job.spec.temporaries is not Temporaries.NONE
        )
        if self._untrimmed_bytes >= TRIM_BYTES:
            trim_heap()
            self._untrimmed_bytes = 0

    def _window_group(self, index: int, jobs: Sequence[_Job]) -> dict[str, Any]:
        public = self._optimizer.param_groups[index]
        group = {**copied_values(public), "params": [job.proxy for job in jobs]}
        if "param_names" in public:
            group["param_names"] = [public["param_names"][job.spec.position] for job in jobs]
        return group

    def _step_on(
        self, groups: Mapping[int, dict[str, Any]], state: defaultdict[Tensor, Any]
    ) -> None:
        """Step on these groups; what it changes besides parameters and state waits for `commit`."""
        self._attributes = step_on(self._optimizer, list(groups.values()), state)
        for index, group in groups.items():
            self._group_values[index] = changed_values(self._optimizer.param_groups[index], group)

    def _take_back(self, job: _Job, state: Mapping[str, Any]) -> None:
        """Put what the optimizer left into the window, the record and the parameter."""
        record = self._next.setdefault(job.param, Record())
        stored = {MASTER} if job.spec.has_master else set()
        for key, value in state.items():
            view = job.views.get(key)
            if view is not None and isinstance(value, Tensor) and _fits(value, view):
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                stored.add(key)
            elif is_streamed(value):
                self._keep_unplanned(job, record, key, value)
            else:
                record.kept[key] = value
        record.stored = frozenset(stored)
        if job.spec.has_master:
            job.target.copy_(job.views[MASTER])

    def _keep_unplanned(self, job: _Job, record: Record, key: str, value: Tensor) -> None:
        record.unplanned.setdefault(job.start, {})[key] = value
        log.warning(
            "%s/%s (%s) was not foreseen when the optimizer was wrapped and stays in memory: a "
            "hyperparameter that adds state was changed since; wrap the optimizer again",
            job.spec.name,
            key,
            format_bytes(value.nbytes),
        )


def _runs(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Yield what one call of the optimizer updates: all, or TRIM_BYTES of rules that go one by one.

    Ordering: kept; a rule that batches keeps its batch, where it is fast.
    """
    run: list[_Job] = []
    run_bytes = 0
    for job in jobs:
        run.append(job)
        run_bytes += job.proxy.nbytes if job.spec.temporaries is Temporaries.ONE else 0
        if run_bytes >= TRIM_BYTES:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run


def _fits(value: Tensor, view: Tensor) -> bool:
    return value.shape == view.shape and value.dtype == view.dtype
