"""StreamedOptimizer: a torch optimizer whose state is on the drive. Read this file first.

`step()` is the whole story: bind today's parameters and gradients, let the stream bring one window
of state after another, update each, and report what happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.optim import Optimizer

from optstream.errors import ClosedError, ConfigError, ModelChangedError, WindowIOError
from optstream.headers import window_files
from optstream.params import Bound, Describer, bind, has_existing_state, parameter_names, unplanned
from optstream.plan import Plan, parse_window_bytes
from optstream.report import Reporter, StepReport
from optstream.rule import check_optimizer
from optstream.store import open_store
from optstream.store.base import Store
from optstream.stream import Stream
from optstream.units import format_bytes, parse_bytes
from optstream.update import Updater

StrPath = str | os.PathLike[str]
log = logging.getLogger("optstream")


def offload(
    optimizer: Optimizer,
    directory: StrPath | Sequence[StrPath],
    *,
    model: nn.Module | None = None,
    window: int | str = "256MiB",
    ram: int | str = 0,
    store: str = "direct",
    master_weights: bool = True,
    process_group: Any = None,
    io_threads: int = 4,
    metrics: StrPath | None = None,
) -> StreamedOptimizer:
    """Move a torch optimizer's state to files and stream it during `step()`.

    The result replaces `optimizer` everywhere (schedulers, scalers, clipping). All file space is
    reserved here; state the optimizer holds already is moved to the files.

    Args:
        optimizer: any torch optimizer whose parameters are updated independently of each other.
        directory: a directory on a drive, or one per drive: windows are striped over them.
        model: gives parameters their fully qualified names.
        window: bytes of state in memory together ("256MiB"); about four windows are the host memory
        used. ram: bytes of state to keep in memory between steps; 0, the RAM tier is not part of
        this version. store: "direct" (O_DIRECT files) or "memory" (plain RAM, for comparison;
        nothing is on a drive). master_weights: keep float32 masters of bfloat16 and float16
        parameters and update those. process_group: None; ranks are not part of this version.
        io_threads: threads a drive. metrics: a JSONL file that gets one line a step.

    Raises:
        ConfigError: an argument that cannot be used.
        UnsupportedOptimizerError: the optimizer cannot be streamed; the message says why.
        StoreError: the directory cannot hold the state; nothing is left there.
    """
    check_optimizer(optimizer)
    if parse_bytes(ram, "ram") != 0:
        raise ConfigError(f"ram={ram!r}: this version keeps no windows in RAM; leave ram=0")
    if process_group is not None:
        raise ConfigError("process_group: this version streams one process; leave it None")
    if isinstance(io_threads, bool) or not isinstance(io_threads, int) or io_threads < 1:
        raise ConfigError(f"io_threads={io_threads!r}: give the threads a drive, at least 1")
    window_bytes = parse_window_bytes(parse_bytes(window, "window"))
    directories = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    with contextlib.ExitStack() as undo:
        reporter = Reporter(type(optimizer).__name__, 0, metrics)
        undo.callback(reporter.close)
        stream = Stream(opened := open_store(store, directories), io_threads)
        undo.callback(stream.close)
        plan = Plan(window_bytes, in_place=opened.in_place)
        names = parameter_names(optimizer.param_groups, model)
        describer = Describer(optimizer, master_weights)
        streamed = StreamedOptimizer(optimizer, opened, stream, plan, describer, names, reporter)
        undo.pop_all()
    return streamed


class StreamedOptimizer(Optimizer):
    """A torch optimizer with its state in a store; made by `offload`.

    Attributes:
        param_groups: the wrapped optimizer's own list; hyperparameters are read from it at every
        step. plan: windows and their cost in bytes. report: StepReport of the last step; None
        before the first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        stream: Stream,
        plan: Plan,
        describer: Describer,
        names: dict[int, str],
        reporter: Reporter,
    ) -> None:
        # torch's way of making an optimizer around existing groups; hooks move here, they run once
        # a step
        self.__setstate__(
            {
                **{key: value for key, value in optimizer.__dict__.items() if "_hooks" in key},
                "defaults": optimizer.defaults,
                "param_groups": optimizer.param_groups,
                "state": optimizer.state,
            }
        )
        self.plan = plan
        self.report: StepReport | None = None
        self._optimizer = optimizer
        self._store = store
        self._stream = stream
        self._describer = describer
        self._names = names
        self._reporter = reporter
        self._updater = Updater(optimizer)
        self._update_s = self._total_s = 0.0
        self._backwards = False
        self._done: set[int] = set()
        self._plan_parameters()
        if has_existing_state(optimizer):
            self._take_existing_state()
        self._finalizer = weakref.finalize(self, _close, stream, reporter, os.getpid())

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have gradients; as the wrapped optimizer does, bit for bit.

        Args:
            closure: evaluated once, before the update, with gradients enabled.

        Raises:
            WindowReadError, WindowWriteError: with file, offset, bytes and errno. The message says
            whether
                the step was applied in full; if not, call `step()` again with the same gradients:
                it updates the windows that are left.
            ModelChangedError: a parameter no longer fits its state; nothing was changed.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        try:
            self._plan_parameters()
            bound = bind(self.plan.params, self.param_groups)
            order = self._order(bound)
            self._update_windows([window for window in order if window not in self._done], bound)
            self._finish_step(order)
        finally:
            self._total_s += time.perf_counter() - start
        self._make_report(len(order))
        self._check_writes()
        return loss

    def _update_windows(self, order: Sequence[int], bound: Mapping[int, Bound]) -> None:
        devices = {window: self._device(window, bound) for window in order}
        with torch.no_grad(), contextlib.closing(self._stream.windows(order, devices)) as windows:
            try:
                for window, data in windows:
                    start = time.perf_counter()
                    self._updater.update(self.plan, self.plan.windows[window], data, bound)
                    self._update_s += time.perf_counter() - start
                    self._done.add(window)
            except WindowIOError as error:
                error.progress = (
                    f"step {self._reporter.next_step} has updated {len(self._done)} windows and "
                    f"left {len(set(order) - self._done)}; call step() again "
                    "with the same gradients to finish it"
                )
                raise

    def _finish_step(self, order: Sequence[int]) -> None:
        groups = range(len(self.param_groups))
        advancing = [group for group in groups if self._describer.advances_group(group)]
        self._updater.commit(self.param_groups, advancing)
        self._done = set()
        if order:
            self._backwards = not self._backwards
        if self._updater.followed:
            names = sorted(self._updater.followed)
            log.info(
                "%d parameters were written by something else (%s, ...): their masters follow",
                len(names),
                names[0],
            )
            self._updater.followed.clear()

    def _make_report(self, num_windows: int) -> None:
        totals = {
            **vars(self._stream.counters),
            "update_s": self._update_s,
            "total_s": self._total_s,
        }
        self.report = self._reporter.report(num_windows, totals)

    def _check_writes(self) -> None:
        """Raise what could not be written, now that the step is complete."""
        try:
            self._stream.check()
        except WindowIOError as error:
            error.progress = f"step {self._reporter.next_step - 1} was applied in full"
            raise

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

    # -- parameters
    # ----------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer and reserve space for its state.

        Raises:
            StoreError: no space for it; the group was not added.
        """
        self._check_open()
        self._optimizer.add_param_group(param_group)
        self._names = parameter_names(self.param_groups, None) | self._names
        try:
            self._plan_parameters()
        except BaseException:
            self.param_groups.pop()
            raise

    def _plan_parameters(self) -> None:
        """Give every parameter that trains a place in the plan and in the store."""
        new = [
            self._describer.describe(self._name(group, position), group, position)
            for group, position in unplanned(
                self.plan.params, self.param_groups, self._optimizer.state
            )
        ]
        if not new:
            return
        plan = self.plan.extended(new)
        self._store.reserve(window_files(plan, self.plan.num_windows))
        self._stream.resize(plan)
        self.plan = plan
        log.info(
            "%s: %d windows, %s of state, at most %s of host memory",
            type(self._optimizer).__name__,
            plan.num_windows,
            format_bytes(plan.state_bytes),
            format_bytes(plan.peak_host_bytes),
        )

    def _name(self, group: int, position: int) -> str:
        param = self.param_groups[group]["params"][position]
        return self._names.get(id(param), f"group{group}.param{position}")

    def _take_existing_state(self) -> None:
        """Move what the optimizer has in memory to the store."""
        tensors = [p for group in self.param_groups for p in group["params"]]
        state = {p: dict(self._optimizer.state[p]) for p in tensors if self._optimizer.state.get(p)}
        params = [
            self.param_groups[spec.group]["params"][spec.position] for spec in self.plan.params
        ]
        bound = {i: Bound(p, p) for i, p in enumerate(params) if p in state}
        order = self._order(bound)
        devices = {window: self._device(window, bound) for window in order}
        self._stream.forget(order)
        with torch.no_grad(), contextlib.closing(self._stream.windows(order, devices)) as windows:
            for window, data in windows:
                self._updater.put(
                    self.plan.params,
                    self.plan.windows[window],
                    data,
                    {index: state[b.param] for index, b in bound.items()},
                )
        self._updater.commit(self.param_groups)
        self._stream.drain()
        self._optimizer.state.clear()

    # -- lifetime
    # ----------------------------------------------

    def close(self) -> None:
        """Wait for the last writes, end the threads and remove the files. May be called twice."""
        self._finalizer()

    def __enter__(self) -> StreamedOptimizer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError(
                "this optimizer is closed and its files are gone; wrap one again with offload()"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a streamed optimizer cannot be copied or pickled: its state is in files that one "
            "process holds"
        )


def _close(stream: Stream, reporter: Reporter, owner: int) -> None:
    # a forked child inherits the object, not the threads; the files are the parent's
    if os.getpid() == owner:
        stream.close()
        reporter.close()
