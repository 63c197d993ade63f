"""Every parameter of the optimizer: its name, its place in the plan, and the rank that keeps it."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.codecs import CodecChoice
from optstream.distributed.exchange import EXCHANGE_BYTES, flat, is_dense
from optstream.distributed.ownership import Cost
from optstream.distributed.ranks import Ranks
from optstream.distributed.shards import here, is_sharded
from optstream.distributed.shares import EVERY_RANK, Part, Place, Shares
from optstream.errors import CheckpointError, ConfigError
from optstream.plan import ParamSpec, Piece, Plan, Window
from optstream.streamed.params import Describer, parameter_names, unplanned
from optstream.streamed.rule import update_flops
from optstream.units import format_bytes

log = logging.getLogger("optstream")


_POSITIONAL = re.compile(r"group\d+\.param\d+", re.ASCII)


def is_positional(name: str) -> bool:
    """Tell whether a parameter has no name but where it stands."""
    return _POSITIONAL.fullmatch(name) is not None


def empty_plan(window_bytes: int, num_ranks: int) -> Plan:
    """Return the plan of one of so many ranks before any parameter is planned."""
    return Plan(window_bytes, exchange_bytes=EXCHANGE_BYTES if num_ranks > 1 else 0)


class Roster:
    """Grows when parameters come; all ranks do it together and come to the same.

    Attributes:
        plan: windows of what this rank keeps.
        shares: what all ranks keep.
        own: of each parameter in the plan, its index in the shares.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: Ranks,
        window_bytes: int,
        master_weights: bool,
        model: nn.Module | None,
        codecs: CodecChoice,
    ) -> None:
        self.plan = empty_plan(window_bytes, ranks.size)
        self.shares = Shares.none(ranks.size)
        self.own: list[int] = []
        self.describer = Describer(optimizer, master_weights, codecs=codecs)
        self._codecs = codecs
        self._optimizer = optimizer
        self._ranks = ranks
        self._model = model
        self._names = parameter_names(optimizer.param_groups, model)
        self._pieces: defaultdict[int, list[tuple[int, Piece]]] = defaultdict(list)

    # -- today's parameters ----------------------------------------------

    def name_groups(self) -> None:
        """Name the parameters of groups that were added since, forget groups that are gone.

        Raises:
            ConfigError: two parameters have one name; nothing was changed.
        """
        groups = self._optimizer.param_groups
        named = {place: name for place, name in self._names.items() if place[0] < len(groups)}
        self._names = parameter_names(groups, self._model, named)

    def name(self, group: int, position: int) -> str:
        """Return the name of `param_groups[group]["params"][position]`."""
        return self._names.get((group, position), f"group{group}.param{position}")

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [
            [self.name(g, position) for position in range(len(group["params"]))]
            for g, group in enumerate(self._optimizer.param_groups)
        ]

    def kept_elsewhere(self) -> set[str]:
        """Return the names of parameters whose state only other ranks have."""
        mine = {spec.name for spec in self.plan.params}
        return {self.name(*place) for place in self.shares.places} - mine

    def param(self, index: int) -> Tensor:
        """Return today's parameter of an index in the plan."""
        spec = self.plan.params[index]
        return self._at((spec.group, spec.position))

    def existing_states(self) -> dict[int, dict[str, Any]]:
        """Return what the optimizer holds in memory, by index in the plan."""
        kept = self._optimizer.state
        params = {index: self.param(index) for index in range(len(self.plan.params))}
        return {index: dict(kept[param]) for index, param in params.items() if kept.get(param)}

    def pieces(self, index: int) -> Sequence[tuple[int, Piece]]:
        """Return where a parameter of the plan lies: windows, and its pieces in them."""
        return self._pieces[index]

    def values(self, rank: int, window: int, has_gradient: bytes) -> Iterator[Tensor]:
        """Yield the storage of what a window of a rank updates, as bytes; shards are left out."""
        for part in self.shares.windows[rank][window]:
            sharded = self.shares.owners[part.param] == EVERY_RANK
            if has_gradient[part.param] and part.stop > part.start and not sharded:
                param = here(self._at(self.shares.places[part.param]))
                yield flat(param)[part.start : part.stop].view(torch.uint8)

    def check_whole(self, what: str) -> None:
        """Refuse what would take this rank's part of a parameter for all of it.

        Raises:
            CheckpointError: a parameter is sharded.
        """
        places = zip(self.shares.places, self.shares.owners, strict=True)
        sharded = [self.name(*place) for place, owner in places if owner == EVERY_RANK]
        if sharded:
            raise CheckpointError(
                f"{what}: {sharded[0]} and {len(sharded) - 1} more are sharded (DTensor), and this "
                "version has no checkpoints or state_dicts of shards; a training that must resume "
                "needs the optimizer without offload, or DistributedDataParallel"
            )

    def _at(self, place: Place) -> Tensor:
        return self._optimizer.param_groups[place[0]]["params"][place[1]]  # type: ignore[no-any-return]

    def check_materialised(self) -> None:
        """Refuse parameters without values, which no step could update.

        Raises:
            ConfigError: some are on the meta device.
        """
        missing = [
            self.name(g, i)
            for g, group in enumerate(self._optimizer.param_groups)
            for i, param in enumerate(group["params"])
            if param.is_meta
        ]
        if missing:
            others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise ConfigError(
                f"parameter {missing[0]}{others} on the meta device, without values: materialise "
                "the model first (model.to_empty(device=...), then load its weights), make its "
                "optimizer, and offload that"
            )

    def facts(self) -> dict[str, str]:
        """Return what must be the same on all ranks, for `check_same`."""
        return {
            f"parameter {self.name(g, i)}": f"{tuple(param.shape)} {param.dtype} at {(g, i)} "
            f"with strides {param.stride()}, trained: {param.requires_grad}, "
            f"placements {getattr(param, 'placements', None)}"
            for g, group in enumerate(self._optimizer.param_groups)
            for i, param in enumerate(group["params"])
        }

    # -- growing ----------------------------------------------

    def wanted(self, with_state: Collection[str] = ()) -> list[Place]:
        """Return the parameters that need state and have no place in any plan.

        Args:
            with_state: names of parameters that need it in any case: frozen ones that once trained.
        """
        groups = self._optimizer.param_groups
        state: dict[Tensor, Any] = dict(self._optimizer.state)
        for g, group in enumerate(groups):
            for position, param in enumerate(group["params"] if with_state else ()):
                if self.name(g, position) in with_state:
                    state[param] = True
        return list(unplanned(self.shares.places, groups, state))

    def extend(self, wanted: Iterable[Sequence[Place]], reserve: Callable[[Plan], Plan]) -> None:
        """Give parameters that any rank wants a place in its keeper's plan.

        Args:
            wanted: by each rank.
            reserve: makes room for the windows that a plan has more than the current one, and says
                which of them are resident.

        Raises:
            StoreError: the store, or memory, cannot hold it; nothing was changed.
            ConfigError: two parameters have one name, or some have no values.
            RankError: another rank's cannot.
        """
        places = sorted({place for each in wanted for place in each})
        if not places:
            return
        self.name_groups()  # of groups that were added to the wrapped optimizer itself
        self.check_materialised()
        specs = [self._describe(place) for place in places]
        if not self.shares.places:
            self._codecs.check_used()
        costs = [cost_of(spec, self._optimizer) for spec in specs]
        owners = self.shares.owners_of(costs, [is_sharded(self._at(place)) for place in places])
        mine = [i for i, owner in enumerate(owners) if owner in (self._ranks.rank, EVERY_RANK)]
        with self._ranks.together():
            plan = reserve(self.plan.extended([specs[i] for i in mine]))
        own = [*self.own, *(len(self.shares.places) + i for i in mine)]
        new = plan.windows[self.plan.num_windows :]
        windows = self._ranks.gather([tuple(_parts(window, own)) for window in new])
        self.shares = self.shares.extended(places, owners, costs, windows)
        for number, window in enumerate(new, self.plan.num_windows):
            for piece in window.pieces:
                self._pieces[piece.param].append((number, piece))
        self.plan, self.own = plan, own
        log.info(
            "%s: %d windows, %s of state, %d of them (%s) resident, at most %s of host memory",
            type(self._optimizer).__name__,
            plan.num_windows,
            format_bytes(plan.state_bytes),
            plan.num_resident,
            format_bytes(plan.resident_bytes),
            format_bytes(plan.peak_host_bytes),
        )

    def _describe(self, place: Place) -> ParamSpec:
        name, param = self.name(*place), self._at(place)
        spec = self.describer.describe(name, *place)
        if self._ranks.size > 1 and not is_sharded(param) and not is_dense(here(param)):
            raise ConfigError(
                f"{name} has gaps or overlaps in its storage (strides {param.stride()}) and cannot "
                "be sent to other ranks; make it contiguous"
            )
        return spec


def cost_of(spec: ParamSpec, optimizer: Optimizer) -> Cost:
    """Return what a step costs the rank that keeps a parameter."""
    group = optimizer.param_groups[spec.group]
    return Cost(update_flops(optimizer, group, spec.shape), spec.state_bytes)


def _parts(window: Window, own: Sequence[int]) -> Iterator[Part]:
    for piece in window.pieces:
        yield Part(own[piece.param], piece.start, piece.stop)
