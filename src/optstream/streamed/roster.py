"""Every parameter of the optimizer: its name, its place in the plan, and the rank that keeps it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.checkpoint.manifest import StoredPiece
from optstream.codecs import CodecChoice
from optstream.distributed.exchange import EXCHANGE_BYTES, flat, is_dense
from optstream.distributed.ownership import Cost
from optstream.distributed.parts import parts_of
from optstream.distributed.ranks import Ranks
from optstream.distributed.shards import here, is_sharded
from optstream.distributed.shares import EVERY_RANK, Part, Place, Shares
from optstream.errors import ConfigError, ModelChangedError
from optstream.plan import ParamSpec, Piece, Plan, Window
from optstream.streamed.params import Describer, parameter_names, unplanned
from optstream.streamed.rule import update_flops
from optstream.units import format_bytes

log = logging.getLogger("optstream")


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

    def first(self, window: int) -> int:
        """Return the first parameter in a window, by its index in the shares."""
        return self.own[self.plan.windows[window].pieces[0].param]

    @property
    def gathered(self) -> set[int]:
        """Parameters that all ranks update together, by their indices in the shares."""
        specs = zip(self.own, self.plan.params, strict=True)
        return {index for index, spec in specs if spec.gathered is not None}

    def existing_states(self) -> dict[int, dict[str, Any]]:
        """Return what the optimizer holds in memory, by index in the plan."""
        kept = self._optimizer.state
        params = {index: self.param(index) for index in range(len(self.plan.params))}
        return {index: dict(kept[param]) for index, param in params.items() if kept.get(param)}

    def pieces(self, index: int) -> Sequence[tuple[int, Piece]]:
        """Return where a parameter of the plan lies: windows, and its pieces in them."""
        return self._pieces[index]

    def stored_pieces(self, index: int, key: str) -> Iterator[StoredPiece]:
        """Yield where a state tensor of a parameter lies: windows are this rank's."""
        for window, piece in self.pieces(index):
            extent = piece.extent(key)
            yield StoredPiece(window, extent.offset, piece.start, extent.numel)

    def tensors_at(self, window: int, start: int, stop: int) -> list[str]:
        """Return "name/key" of what lies in a range of bytes of a window's data."""
        return [
            f"{self.plan.params[piece.param].name}/{extent.key}"
            for piece in self.plan.windows[window].pieces
            for extent in piece.extents
            if extent.offset < stop and start < extent.offset + extent.num_bytes
        ]

    def values(self, rank: int, window: int, has_gradient: bytes) -> Iterator[Tensor]:
        """Yield the storage of what a window of a rank updates, as bytes; shards are left out."""
        for part in self.shares.windows[rank][window]:
            sharded = self.shares.owners[part.param] == EVERY_RANK
            if has_gradient[part.param] and part.stop > part.start and not sharded:
                param = here(self._at(self.shares.places[part.param]))
                yield flat(param)[part.start : part.stop].view(torch.uint8)

    @property
    def all_here(self) -> bool:
        """Whether no parameter's state is on one of several ranks alone."""
        return self._ranks.size == 1 or all(owner == EVERY_RANK for owner in self.shares.owners)

    def _at(self, place: Place) -> Tensor:
        return self._optimizer.param_groups[place[0]]["params"][place[1]]  # type: ignore[no-any-return]

    def check_model(self) -> None:
        """Refuse a step for which the model has gradients in other parameters than the optimizer's.

        Raises:
            ModelChangedError: names the first.
        """
        of_model = dict(self._model.named_parameters()) if self._model is not None else {}
        for place, name in self._names.items():
            param = of_model.get(name)
            if param is not None and param.grad is not None and param is not self._at(place):
                raise ModelChangedError(
                    f"{name} of the model has a gradient and is no longer the parameter that the "
                    "optimizer has: fully_shard, or something like it, has replaced it since; "
                    "make the optimizer, and wrap it, after that"
                )

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
        sharded = [is_sharded(self._at(place)) for place in places]
        costs = [
            Cost(0, spec.state_bytes) if in_parts else cost_of(spec, self._optimizer)
            for spec, in_parts in zip(specs, sharded, strict=True)
        ]
        owners = self.shares.owners_of(costs, sharded)
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
        if spec.gathered is not None:
            self._check_together(name, param)
        if self._ranks.size > 1 and not is_sharded(param) and not is_dense(here(param)):
            raise ConfigError(
                f"{name} has gaps or overlaps in its storage (strides {param.stride()}) and cannot "
                "be sent to other ranks; make it contiguous"
            )
        return spec

    def _check_together(self, name: str, param: Tensor) -> None:
        """Refuse what ranks update together unless all of them agree on every step."""
        others = set(parts_of(name, param).ranks)
        if not others <= set(self._ranks.members):
            raise ConfigError(
                f"{name} is sharded over the ranks {sorted(others)}, which orthogonalise it "
                "together, so that they must agree on every step: give offload() "
                "process_group=torch.distributed.group.WORLD, or another group that has them all"
            )


def cost_of(spec: ParamSpec, optimizer: Optimizer) -> Cost:
    """Return what a step costs the rank that keeps a parameter."""
    group = optimizer.param_groups[spec.group]
    return Cost(update_flops(optimizer, group, spec.shape), spec.state_bytes)


def _parts(window: Window, own: Sequence[int]) -> Iterator[Part]:
    for piece in window.pieces:
        yield Part(own[piece.param], piece.start, piece.stop)
