"""StreamedOptimizer: a torch optimizer whose state is on the drive. Read this file first.

`offload()` in wrap.py makes it; `step()` is what training calls. streamed/state.py has the loop
behind it: agree with the other ranks, bind today's parameters and gradients, let the stream bring
one window of state after another, update each, send what is new.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import torch
from torch.optim import Optimizer

from optstream.checkpoint.directory import checkpoint_path
from optstream.checkpoint.match import by_name
from optstream.distributed.agreement import check_same
from optstream.distributed.place import Place
from optstream.errors import CheckpointError, ClosedError, ConfigError, WindowIOError
from optstream.plan import Plan
from optstream.report import Reporter, StepReport
from optstream.stream.background import Background
from optstream.streamed import lifetime
from optstream.streamed.loading import Loader
from optstream.streamed.saving import Saver
from optstream.streamed.scaling import LossScale, divides_scale
from optstream.streamed.state import StreamedState
from optstream.streamed.view import StateView

log = logging.getLogger("optstream")
StrPath = str | os.PathLike[str]


class StreamedOptimizer(Optimizer):
    """A torch optimizer with its state in a store; made by `offload`.

    Attributes:
        param_groups: the wrapped optimizer's own list; hyperparameters are read from it at every
            step.
        state: a view of the state, to look at; see StateView.
        report: StepReport of the last step; None before the first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        state: StreamedState,
        reporter: Reporter,
        places: Sequence[Place],
    ) -> None:
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
        self._saver = Saver(optimizer, state)
        self._loader = Loader(optimizer, state)
        self._scale = LossScale(self, optimizer)
        state.extend()
        existing = state.roster.existing_states()
        if existing:
            state.put(existing)
        self._finalizer = weakref.finalize(
            self, lifetime.end, self._saver.background, state, reporter, places, os.getpid()
        )

    def take_over(self) -> None:
        """Let the wrapped optimizer keep no state and step no more; on all ranks, or on none."""
        self._optimizer.state.clear()
        self._optimizer._offloaded = self._finalizer  # type: ignore[attr-defined]
        lifetime.bar(self._optimizer)

    @property
    def plan(self) -> Plan:
        """Windows and their cost in bytes."""
        return self._state.plan

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: whether the wrapped optimizer divides by the scale itself."""
        return divides_scale(self._optimizer)

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
            RankError: another rank failed; if its message says that its step can be finished, call
                `step()` again on every rank.
        """
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # a scheduler made before wrapping looks there and warns of a wrong order otherwise
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._scale.overflowed(self._state.ranks):
            log.info("step skipped: a gradient is infinite or not a number")
            return loss
        start = time.perf_counter()
        try:
            with self._scale.handed_on():
                num_windows = self._state.step(self._reporter.next_step)
        finally:
            self._total_s += time.perf_counter() - start
        self._make_report(num_windows)
        with self._state.ranks.together():
            self._check_writes()
        return loss

    def _make_report(self, num_windows: int) -> None:
        totals = {**self._state.totals(), "total_s": self._total_s}
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
            ConfigError: a name that another parameter has, or a parameter on the meta device; the
                group was not added.
        """
        self._check_open()
        self._optimizer.add_param_group(param_group)
        roster = self._state.roster
        try:
            roster.name_groups()
            check_same(self._state.ranks, roster.facts())
            self._state.extend()
        except BaseException:
            self.param_groups.pop()
            roster.name_groups()
            raise

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
        if not self._state.roster.all_here:
            raise CheckpointError(
                f"state_dict() on {self._state.ranks.size} ranks would have this rank's part only; "
                "use save(), then load() on any number of ranks, or optstream export"
            )
        self._state.extend()  # what was unfrozen meanwhile has an empty entry
        view = self.state
        self.state = self._saver.by_param(self._reporter.next_step - 1)  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = view

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Replace all state, window by window.

        Args:
            state_dict: of this optimizer, or of the plain one it wraps. Parameters are matched by
                name where both sides have names, else by position.
            strict: what does not fit is an error; else a warning, and a parameter whose state is
                not whole starts anew.

        Raises:
            CheckpointError: the state does not fit; nothing was changed.
        """
        self._check_open()
        self._saver.background.wait()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        with self._state.ranks.together():
            groups, states = by_name(state_dict, self._state.roster.group_names(), strict)
            given = self._loader.check("the state_dict", groups, states, strict)
        with self._loader.on_all_ranks("the state_dict"):
            self._loader.put("the state_dict", groups, given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # -- checkpoints ----------------------------------------------

    def save(self, path: StrPath, wait: bool = True) -> Background:
        """Make a checkpoint of the state: a directory of links to the files that hold it.

        No state bytes move where `path` is on the filesystem of the state; training may go on at
        once, its next writes go to fresh files. On another filesystem the files are copied.

        Args:
            path: of the new directory; a checkpoint that is there is replaced when the new one is
                whole. It holds nothing else: save weights beside it.
            wait: False does all but freezing in the background; `wait()` of the returned object
                gives errors. A second save, a load and `close` wait for it first.

        Several ranks call it together and make one checkpoint, which any number of them can load.

        Raises:
            OutOfSpaceError: no space for copies, or for the writes that follow; nothing was
                changed.
            StoreError: the path cannot be used; what was there is still there.
        """
        self._check_whole()
        self._saver.save(checkpoint_path(path), self._reporter.next_step - 1)
        if wait:
            self._saver.background.wait()
        return self._saver.background

    def load(self, path: StrPath, *, strict: bool = True, check: bool = False) -> None:
        """Take a checkpoint's state.

        Laid out like this optimizer and on its filesystem, its files are used as they are and read
        when the next step needs them; each piece is then held against its digest. Otherwise
        (another window size, drive, store or order of parameters) all is checked, then copied
        window by window.

        Args:
            path: a directory made by `save`.
            strict: what does not fit is an error; else a warning, and a parameter whose state is
                not whole starts anew.
            check: read and check everything before anything is changed.

        Raises:
            CheckpointError: not a whole checkpoint, or it does not fit; nothing was changed.
            WindowReadError: bytes are not what was written.
        """
        self._check_open()
        self._saver.background.wait()
        self._reporter.resume(self._loader.load(checkpoint_path(path), strict=strict, check=check))

    # -- lifetime ----------------------------------------------

    def close(self) -> None:
        """Wait for the last writes, end the threads and remove the files; may be called twice.

        Directories that were made for the state go too when nothing is in them. The wrapped
        optimizer is a plain one again, without state: wrap it anew, or give it a state_dict.
        """
        self._finalizer()

    def __enter__(self) -> StreamedOptimizer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._state.stream.check_process()
        if not self._finalizer.alive:
            raise ClosedError(
                "this optimizer is closed and its files are gone; wrap one again with offload()"
            )

    def _check_whole(self) -> None:
        self._check_open()
        if self._state.broken:
            raise CheckpointError(self._state.broken)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a streamed optimizer cannot be copied or pickled: its state is in files that one "
            "process holds"
        )
