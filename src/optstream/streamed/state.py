"""The state of one optimizer: the store that holds it, the stream that moves it, the updates.

Everything that brings windows in goes through `_windows`: a step updates them, a load fills them.
Which parameters this rank keeps, and in which windows, the roster says.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.bound import Bound
from optstream.distributed.agreement import Turn, check_turns, make_turn
from optstream.distributed.exchange import Exchange
from optstream.distributed.lockstep import Lockstep
from optstream.distributed.ranks import Ranks
from optstream.distributed.shards import here
from optstream.errors import ModelChangedError, RankError, StateChangedError, WindowIOError
from optstream.plan import Plan
from optstream.ram import Ram
from optstream.store.base import Store
from optstream.stream import Stream
from optstream.streamed.headers import window_files
from optstream.streamed.params import bind, gradient_source
from optstream.streamed.progress import Progress
from optstream.streamed.roster import Roster
from optstream.update import Record, Updater

log = logging.getLogger("optstream")
States = Mapping[int, Mapping[str, Any]]
"""Of parameters by their index in `Plan.params`: tensors and values by the optimizer's own keys."""


class StreamedState:
    """What the wrapped optimizer would keep in memory, as far as this rank keeps it.

    Attributes:
        roster: the parameters; who keeps them.
        ranks: those that share the state.
        progress: of the step that is under way.
        update_s: running total of seconds in updates.
        exchange_wait_s: running total of seconds in which steps only waited for other ranks.
        broken: why the state is neither the old nor the new one; "" where it is whole.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        roster: Roster,
        ranks: Ranks,
        store: Store,
        io_threads: int,
        ram: Ram,
        codec_seed: int,
    ) -> None:
        self.roster = roster
        self.ranks = ranks
        self.update_s = 0.0
        self.exchange_wait_s = 0.0
        self.broken = ""
        self.store = store
        self._stranded = ""
        self._ram = ram
        self.stream = Stream(store, io_threads)
        self._optimizer = optimizer
        self._updater = Updater(optimizer, codec_seed)
        self.progress = Progress()

    @property
    def plan(self) -> Plan:
        """Windows and their cost."""
        return self.roster.plan

    @property
    def records(self) -> Mapping[int, Record]:
        """What parameters keep outside of windows, by their index in the plan."""
        return self._updater.records

    def totals(self) -> dict[str, float]:
        """Return the running totals that a StepReport counts."""
        return {
            **vars(self.stream.counters),
            "update_s": self.update_s,
            "exchanged_bytes": self.ranks.exchanged_bytes,
            "exchange_wait_s": self.exchange_wait_s,
        }

    # -- parameters ----------------------------------------------

    def extend(self, with_state: Collection[str] = ()) -> None:
        """Give every parameter that trains a place in the plan and in the store; on all ranks.

        Args:
            with_state: names of parameters that get one in any case: frozen ones that once trained.

        Raises:
            StoreError: the store, or memory, cannot hold it; nothing was changed.
        """
        with self.ranks.together():
            wanted = self.ranks.gather(self.roster.wanted(with_state))
            self._extend(wanted)

    def _extend(self, wanted: Sequence[Sequence[tuple[int, int]]]) -> None:
        if self._stranded:
            raise StateChangedError(self._stranded)
        try:
            self.roster.extend(wanted, self._reserve)
        except RankError as error:
            # what was reserved here belongs to no plan
            self._stranded = f"no place for new parameters ({error}); wrap the optimizer again"
            raise

    def _reserve(self, plan: Plan) -> Plan:
        plan = replace(plan, cached=self.store.cached)
        if self.store.in_place:
            plan = plan.with_resident(plan.data_bytes)
        else:
            plan = self._ram.keep_in(plan, self.plan.peak_host_bytes if self.plan.windows else 0)
        self.stream.extend(plan, window_files(plan, self.plan.num_windows))
        return plan

    # -- the step ----------------------------------------------

    def step(self, number: int) -> int:
        """Update every parameter with a gradient; return the number of this rank's windows.

        A step that failed goes on where it stopped: windows it has updated are left alone. Counters
        advance when all ranks have updated theirs.

        Args:
            number: of the step, for errors.
        """
        self._updater.step = number
        named = self.progress.named(number, self._tensors_at)
        with self._waits_counted(), self.ranks.together(), named:
            turns, bound = self._take_turns()
            mine = turns[self.ranks.rank].windows
            self.progress.begin(mine, any(turn.windows for turn in turns))
            exchange = Exchange(
                self.ranks,
                [turn.windows for turn in turns],
                lambda rank, window: self.roster.values(rank, window, turns[rank].has_gradient),
            )
            try:
                self._update(mine, bound, exchange)
            finally:
                exchange.finish()
        return self._finish()

    @contextlib.contextmanager
    def _waits_counted(self) -> Iterator[None]:
        before_s = self.ranks.wait_s
        try:
            yield
        finally:
            self.exchange_wait_s += self.ranks.wait_s - before_s

    def _take_turns(self) -> tuple[list[Turn], dict[int, Bound]]:
        """Agree with the other ranks on what each does in this step."""
        turn, bound = self._turn()
        turns = self.ranks.gather(turn)
        if any(each.wanted for each in turns):
            self._extend([each.wanted for each in turns])
            turn, bound = self._turn()
            turns = self.ranks.gather(turn)
        groups, shares = self._optimizer.param_groups, self.roster.shares
        check_turns(self.ranks, turns, shares, groups, self.roster.gathered)
        return turns, bound

    def _turn(self) -> tuple[Turn, dict[int, Bound]]:
        groups = self._optimizer.param_groups
        gradient_of = gradient_source(self._optimizer)
        bound = bind(self.plan.params, groups, gradient_of)
        if not bound:
            self.roster.check_model()
        left = [window for window in self._order(bound) if window not in self.progress.done]
        shares, wanted = self.roster.shares, self.roster.wanted()
        together = [self.roster.first(window) for window in left if self._is_gathered(window)]
        return make_turn(shares, groups, wanted, left, together, gradient_of), bound

    def _update(self, left: Sequence[int], bound: Mapping[int, Bound], exchange: Exchange) -> None:
        lockstep = Lockstep(self.ranks, any(map(self._is_gathered, left[:1])))
        with self._windows(left, bound) as windows, lockstep:
            for window, data in windows:
                lockstep.meet(self._is_gathered(window))
                start = time.perf_counter()
                self._updater.update(self.plan, self.plan.windows[window], data, bound)
                self.update_s += time.perf_counter() - start
                self.progress.advance(window)
                exchange.advance()
            lockstep.meet(False)

    def _is_gathered(self, window: int) -> bool:
        return self.plan.windows[window].gathered

    def _tensors_at(self, error: WindowIOError) -> list[str]:
        """Return "name/key" of the state that a failed transfer of a window was to move."""
        if error.window is None:
            return []
        start = error.offset - len(self.store.file(error.window).header)
        return self.roster.tensors_at(error.window, start, start + error.num_bytes)

    def _finish(self) -> int:
        """End a step that all ranks are through with; return the number of windows."""
        groups = self._optimizer.param_groups
        advancing = range(len(groups)) if self.roster.describer.advances_groups else ()
        self._updater.commit(groups, advancing)
        num_windows = self.progress.finish()
        if self._updater.followed:
            names = sorted(self._updater.followed)
            log.info(
                "%d parameters (%s, ...) were written by something else since the last step: "
                "their masters follow",
                len(names),
                names[0],
            )
            self._updater.followed.clear()
        return num_windows

    # -- state from elsewhere ----------------------------------------------

    def put(self, states: States) -> None:
        """Replace all state; parameters that are not in `states` start anew.

        Raises:
            StateChangedError: a tensor that does not fit what the optimizer keeps.
            WindowIOError: the store; the state is then neither the old nor the new one.
        """
        bound = {}
        for index in states:
            param = here(self.roster.param(index))
            bound[index] = Bound(param, param)
        order = self._order(bound)
        self.start_anew({})
        self.stream.replace(())
        with self._windows(order, bound) as windows:
            for window, data in windows:
                self._updater.put(self.plan, self.plan.windows[window], data, states)
        self._updater.commit(self._optimizer.param_groups)
        self.stream.drain()

    def start_anew(self, records: Mapping[int, Record]) -> None:
        """Forget what is in memory, and a step that failed half-way; keep these instead."""
        self._updater.reset()
        self._updater.records.update(records)
        self.progress.forget()

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
        active.sort(key=lambda index: not self._is_gathered(index))  # at one end on all ranks
        return active[::-1] if self.progress.backwards else active

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
