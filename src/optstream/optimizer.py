"""StreamedOptimizer: a torch optimizer whose state is on the drive. Read this file first.

`step()` is what training calls; state.py has the loop behind it: bind today's parameters and
gradients, let the stream bring one window of state after another, update each.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.checkpoint.directory import (
    check_space,
    check_target,
    existing_parent,
    open_checkpoint,
    publish,
    verify,
)
from optstream.checkpoint.match import by_name, check_class, check_shapes, some
from optstream.codecs import EXACT, CodecChoice, Setting
from optstream.errors import CheckpointError, ClosedError, ConfigError, WindowIOError
from optstream.loading import Loader
from optstream.plan import Plan, parse_window_bytes
from optstream.ram import Ram
from optstream.report import Reporter, StepReport
from optstream.rule import check_optimizer
from optstream.state import StreamedState
from optstream.state_view import StateView
from optstream.store import open_store
from optstream.stream import Stream
from optstream.stream.background import Background
from optstream.units import parse_bytes

StrPath = str | os.PathLike[str]


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
    codec: Setting = EXACT,
    codec_seed: int = 0,
) -> StreamedOptimizer:
    """Move a torch optimizer's state to files and stream it during `step()`.

    The result replaces `optimizer` everywhere (schedulers, scalers, clipping). All file space is
    reserved here; state the optimizer holds already is moved to the files.

    Args:
        optimizer: any torch optimizer whose parameters are updated independently of each other.
        directory: a directory on a drive, or one per drive: windows are striped over them.
        model: gives parameters their fully qualified names.
        window: bytes of state in memory together ("256MiB"); about four windows are the host memory
            used.
        ram: state that stays in memory between steps, beside those windows, so that it causes no
            traffic: "8GiB", "25%" of the state, or "auto" for what this process can spare (see
            `Ram`). A save writes it.
        store: "direct" (O_DIRECT files) or "memory" (plain RAM, for comparison; nothing is on a
            drive, `ram` changes nothing).
        master_weights: keep float32 masters of bfloat16 and float16 parameters and update those.
        process_group: None; ranks are not part of this version.
        io_threads: threads a drive.
        metrics: a JSONL file that gets one line a step.
        codec: how state is stored: "exact"; "split" (masters of bfloat16 parameters in 16 bits,
            still exact); "bf16", "bf16-stochastic" or "int8" (moments too); or such names by state
            key or by pattern of parameter names, the first that matches counts
            (docs/codecs.md).
        codec_seed: of random rounding in "bf16-stochastic".

    Raises:
        ConfigError: an argument that cannot be used.
        UnsupportedOptimizerError: the optimizer cannot be streamed; the message says why.
        StoreError: the directory cannot hold the state; nothing is left there.
    """
    check_optimizer(optimizer)
    if process_group is not None:
        raise ConfigError("process_group: this version streams one process; leave it None")
    if isinstance(io_threads, bool) or not isinstance(io_threads, int) or io_threads < 1:
        raise ConfigError(f"io_threads={io_threads!r}: give the threads a drive, at least 1")
    window_bytes = parse_window_bytes(parse_bytes(window, "window"))
    budget = Ram(ram)
    with contextlib.ExitStack() as undo:
        opened = open_store(store, directory)
        state = StreamedState(
            optimizer,
            opened,
            io_threads,
            window_bytes,
            budget,
            master_weights,
            model,
            CodecChoice(codec),
            codec_seed,
        )
        undo.callback(state.stream.close)
        reporter = Reporter(type(optimizer).__name__, 0, metrics)
        undo.callback(reporter.close)
        streamed = StreamedOptimizer(optimizer, state, reporter)
        undo.pop_all()
    return streamed


class StreamedOptimizer(Optimizer):
    """A torch optimizer with its state in a store; made by `offload`.

    Attributes:
        param_groups: the wrapped optimizer's own list; hyperparameters are read from it at every
            step.
        state: a view of the state, to look at; see StateView.
        report: StepReport of the last step; None before the first.
    """

    def __init__(self, optimizer: Optimizer, state: StreamedState, reporter: Reporter) -> None:
        # torch's way of making an optimizer around existing groups; hooks move here, where they run
        # once a step
        self.__setstate__(
            {
                **{key: value for key, value in optimizer.__dict__.items() if "_hooks" in key},
                "defaults": optimizer.defaults,
                "param_groups": optimizer.param_groups,
                "state": StateView(state),
            }
        )
        self.report: StepReport | None = None
        self._optimizer = optimizer
        self._state = state
        self._reporter = reporter
        self._total_s = 0.0
        self._saving = Background()
        self._loader = Loader(optimizer, state)
        state.extend()
        self._take_existing_state()
        self._finalizer = weakref.finalize(
            self, _close, self._saving, state.stream, reporter, os.getpid()
        )
        optimizer._offloaded = self._finalizer  # type: ignore[attr-defined]

    @property
    def plan(self) -> Plan:
        """Windows and their cost in bytes."""
        return self._state.plan

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
                whether the step was applied in full; if not, call `step()` again with the same
                gradients: it updates the windows that are left.
            ModelChangedError: a parameter no longer fits its state; nothing was changed.
        """
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        try:
            self._state.extend()
            num_windows = self._state.step()
        except WindowIOError as error:
            names = self._state.tensors_at(error)
            error.progress = f"that is {some(names)}; " if names else ""
            error.progress += (
                f"step {self._reporter.next_step} has updated {self._state.num_updated} windows "
                f"and left {self._state.num_left}; call step() again with the same gradients to "
                "finish it"
            )
            raise
        finally:
            self._total_s += time.perf_counter() - start
        self._make_report(num_windows)
        self._check_writes()
        return loss

    def _make_report(self, num_windows: int) -> None:
        totals = {
            **vars(self._state.stream.counters),
            "update_s": self._state.update_s,
            "total_s": self._total_s,
        }
        self.report = self._reporter.report(num_windows, self.plan.resident_bytes, totals)

    def _check_writes(self) -> None:
        """Raise what could not be written, now that the step is complete."""
        try:
            self._state.stream.check()
        except WindowIOError as error:
            error.progress = f"step {self._reporter.next_step - 1} was applied in full"
            raise

    # -- parameters ----------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer and reserve space for its state.

        Raises:
            StoreError: no space for it; the group was not added.
        """
        self._check_open()
        self._optimizer.add_param_group(param_group)
        self._state.name_new_parameters()
        try:
            self._state.extend()
        except BaseException:
            self.param_groups.pop()
            raise

    def _take_existing_state(self) -> None:
        """Move what the optimizer has in memory to the store."""
        params = {index: self._state.param(index) for index in range(len(self.plan.params))}
        kept = self._optimizer.state
        existing = {index: dict(kept[p]) for index, p in params.items() if kept.get(p)}
        if existing:
            self._state.put(existing)
        self._optimizer.state.clear()

    # -- state as tensors ----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot in torch's form; its tensors are mapped from files, not in memory.

        They keep their values while training goes on (the next write of each window goes to a fresh
        file), so this needs space on the drive for a second generation. Parameters with masters
        have them under "master".

        Raises:
            OutOfSpaceError: no space for the second generation; training can go on.
        """
        self._check_whole()
        self._state.extend()  # what was unfrozen meanwhile has an empty entry
        view = self.state
        self.state = self._snapshot_by_param()  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = view

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Replace all state, window by window.

        Args:
            state_dict: of this optimizer, or of the plain one it wraps. Parameters are matched by
                name where both sides have names, else by position.
            strict: state that is missing or left over is an error; else it is a warning.

        Raises:
            CheckpointError: the state does not fit; nothing was changed.
        """
        self._check_open()
        self._saving.wait()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, states = by_name(state_dict, self._loader.group_names())
        self._loader.check("the state_dict", groups, states, strict)
        self._loader.put("the state_dict", groups, states)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _snapshot_by_param(self) -> dict[Tensor, dict[str, Any]]:
        snapshot = self._state.snapshot(self._reporter.next_step - 1)
        planned = [self._state.param(index) for index in range(len(self.plan.params))]
        specs = self.plan.params
        return {p: snapshot.state(spec.name) for p, spec in zip(planned, specs, strict=True)}

    # -- checkpoints ----------------------------------------------

    def save(self, path: StrPath, wait: bool = True) -> Background:
        """Make a checkpoint of the state: a directory of links to the files that hold it.

        No state bytes move where `path` is on the filesystem of the state; training may go on at
        once, its next writes go to fresh files. On another filesystem the files are copied.

        Args:
            path: of the new directory; a checkpoint that is there is replaced when the new one is
                whole.
            wait: False copies in the background; the returned object's `wait()` gives errors. A
                second save, a load and `close` wait for it first.

        Raises:
            OutOfSpaceError: no space for copies, or for the writes that follow; nothing was
                changed.
            StoreError: the path cannot be used; what was there is still there.
        """
        self._check_whole()
        self._saving.wait()
        target = Path(path).absolute()
        check_target(target)
        check_space(target, self._state.bytes_off(existing_parent(target)))
        snapshot = self._state.snapshot(self._reporter.next_step - 1)
        self._saving.start(partial(publish, snapshot, target))
        if wait:
            self._saving.wait()
        return self._saving

    def load(self, path: StrPath, *, strict: bool = True, check: bool = False) -> None:
        """Take a checkpoint's state.

        Laid out like this optimizer and on its filesystem, its files are used as they are and read
        when the next step needs them; each piece is then held against its digest. Otherwise
        (another window size, drive, store or order of parameters) all is checked, then copied
        window by window.

        Args:
            path: a directory made by `save`.
            strict: state that is missing or left over is an error; else it is a warning.
            check: read and check everything before anything is changed.

        Raises:
            CheckpointError: not a whole checkpoint, or it does not fit; nothing was changed.
            WindowReadError: bytes are not what was written.
        """
        self._check_open()
        self._saving.wait()
        snapshot = open_checkpoint(Path(path).absolute())
        manifest, source = snapshot.manifest, f"checkpoint {os.fspath(path)}"
        check_class(source, manifest.optimizer, self._optimizer, strict)
        states = {name: snapshot.state(name) for name in manifest.params}
        self._loader.check(source, manifest.groups, states, strict)
        shapes = {name: param.shape for name, param in manifest.params.items()}
        check_shapes(source, shapes, self.plan.params)
        if check:
            verify(snapshot)
        if not self._loader.adopt(snapshot):
            if not check:
                verify(snapshot)
            self._loader.put(source, manifest.groups, states)
        self._reporter.resume(manifest.step)

    # -- lifetime ----------------------------------------------

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

    def _check_whole(self) -> None:
        self._check_open()
        if self._loader.broken:
            raise CheckpointError(self._loader.broken)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a streamed optimizer cannot be copied or pickled: its state is in files that one "
            "process holds"
        )


def _close(saving: Background, stream: Stream, reporter: Reporter, owner: int) -> None:
    # a forked child inherits the object, not the threads; the files are the parent's
    if os.getpid() == owner:
        try:
            saving.wait()
        finally:
            stream.close()
            reporter.close()
