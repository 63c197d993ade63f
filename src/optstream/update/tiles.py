"""Tiles: what of a window goes to the optimizer at once, with its gradient and its state.

State that is stored as it is stays in the window's buffer and is updated there. Encoded state is
decoded into scratch, tile by tile, and encoded back when its tile is through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optstream.bound import Bound
from optstream.codecs import Place, in_memory_order, salt
from optstream.distributed.shards import like
from optstream.plan import MASTER, MAX_TILE, Extent, ParamSpec, Piece, Plan, Temporaries, Window
from optstream.update.decoding import Decoded, Scratch, encoded_extent, tile_views
from optstream.update.master import follow_parameter
from optstream.update.record import Record, working_copy
from optstream.update.runs import Tile, batches, first_batches
from optstream.update.views import ExtentViews, GradientScratch, is_copied, part_of

_ONLY_MASTER = frozenset({MASTER})
_NOTHING: Mapping[str, Decoded] = {}


@dataclass(frozen=True)
class _Gradient:
    """A piece of a parameter and the parameter's whole gradient."""

    target: Tensor
    grad: Tensor
    bound: Bound


@dataclass
class Tiles:
    """Makes the tiles of windows.

    Attributes:
        records: by index in the plan: what each parameter keeps.
        seed, step: random rounding depends on them; `step` is the number of the current one.
        changed: (name, 0-dim bool) of masters held against their parameters: whether those were
            written by something else.
    """

    records: defaultdict[int, Record]
    seed: int
    step: int = 0
    changed: list[tuple[str, Tensor]] = field(default_factory=list)
    _gradients: GradientScratch = field(default_factory=GradientScratch)
    _scratch: dict[torch.device, Scratch] = field(default_factory=dict)

    def runs(
        self, plan: Plan, window: Window, buffer: Tensor, bound: Mapping[int, Bound]
    ) -> Iterator[list[Tile]]:
        """Yield what one call of the optimizer updates, ready to be updated.

        Ordering: a run is through, `store` included, before the next is asked for.
        """
        new: list[Piece] = []
        plain: list[Piece] = []
        copied: list[Piece] = []
        encoded: list[Piece] = []
        for piece in window.pieces:
            if piece.param in bound:
                spec = plan.params[piece.param]
                is_new = not window.gathered and self._makes_state(spec, piece.param)
                kind = copied if is_copied(bound[piece.param].grad, piece) else plain
                (encoded if spec.is_encoded else new if is_new and kind is plain else kind).append(
                    piece
                )
        # new state is made by the optimizer itself: little at a time keeps that within the bound
        yield from first_batches(self._plain(plan, new, buffer, bound))
        yield from batches(self._plain(plan, plain, buffer, bound), at_once=window.gathered)
        # one tile at a time, too: no plan counts copies of gradients
        yield from ([tile] for tile in self._plain(plan, copied, buffer, bound))
        if encoded:
            yield from self._encoded(plan, encoded, buffer, bound)

    def store(self, tile: Tile, keys: Iterable[str]) -> None:
        """Encode what is now in the views of these keys; the parameter was written before."""
        for key in keys:
            if key in tile.decoded:
                decoded = tile.decoded[key]
                scratch = self._scratch[decoded.values.device]
                place = self._place(tile.spec, key, tile.target, tile.views[key])
                scratch.encode(decoded, place)

    def put(self, plan: Plan, piece: Piece, extent: Extent, values: Tensor, buffer: Tensor) -> None:
        """Encode given values of a piece into a window's data.

        Args:
            values: of the extent's shape, on any device, of any dtype that widens to float32.
        """
        spec = plan.params[piece.param]
        encoded = encoded_extent(buffer, extent, piece.start)
        for start in _starts(piece, spec):
            stop = min(start + spec.max_tile, piece.numel)
            part = encoded if piece.whole else encoded.part(start, stop)
            scratch = self.scratch(buffer.device, plan.scratch_bytes)
            flat = scratch.take(part.numel)
            if piece.whole:
                flat.as_strided(extent.shape, extent.stride).copy_(values)
            else:
                flat.copy_(values[start:stop])
            # a master goes with the parameter that it rounds to; the next step compares
            place = Place(salt=salt(self.seed, self.step, f"{spec.name}/{extent.key}"))
            scratch.coder.encode(flat, part, place)

    def scratch(self, device: torch.device, num_bytes: int) -> Scratch:
        """Return the scratch for encoded state on a device, empty."""
        scratch = self._scratch.get(device)
        if scratch is None or scratch.num_bytes < num_bytes:
            scratch = self._scratch[device] = Scratch(device, num_bytes)
        scratch.clear()
        return scratch

    def _plain(
        self, plan: Plan, pieces: Sequence[Piece], buffer: Tensor, bound: Mapping[int, Bound]
    ) -> Iterator[Tile]:
        gradients = self._gradients.spaces(plan, pieces, bound)
        of_window = ExtentViews(buffer)
        for piece in pieces:
            spec, there = plan.params[piece.param], bound[piece.param]
            views = {extent.key: of_window.view(extent) for extent in piece.extents}
            target = part_of(there.param, piece)  # the proxy is what detaches it
            gradient, wide = there.grad, None
            if gradient.requires_grad:
                gradient = gradient.detach()
            if spec.has_master:
                master = views[MASTER]
                self._load_master(spec, self.records[piece.param], master, target)
                wide = next(gradients)[: piece.numel].as_strided(target.shape, master.stride())
            max_tile = spec.max_tile
            if is_copied(gradient, piece):
                max_tile = min(max_tile, MAX_TILE)
            if piece.numel <= max_tile:
                grad = _widened(wide, part_of(gradient, piece), there.factor)
                yield self._tile(spec, piece, 0, target, grad, views, there)
                continue
            for start in range(0, piece.numel, max_tile):
                part = slice(start, min(start + max_tile, piece.numel))
                grad = part_of(gradient, piece, part.start, part.stop)
                grad = _widened(None if wide is None else wide[part], grad, there.factor)
                of_tile = {key: view[part] for key, view in views.items()}
                yield self._tile(spec, piece, start, target[part], grad, of_tile, there)

    def _encoded(
        self, plan: Plan, pieces: Sequence[Piece], buffer: Tensor, bound: Mapping[int, Bound]
    ) -> Iterator[list[Tile]]:
        """Yield tiles, decoded, as many at once as the scratch has room for."""
        scratch = self.scratch(buffer.device, plan.scratch_bytes)
        run: list[Tile] = []
        for piece in pieces:
            spec, here = plan.params[piece.param], bound[piece.param]
            whole = _Gradient(
                part_of(here.param.detach(), piece),
                here.grad.detach(),
                here,
            )
            alone = spec.temporaries is Temporaries.BATCHED or self._makes_state(spec, piece.param)
            alone |= spec.gathered is not None  # whatever fits here, all ranks make the same calls
            for start in _starts(piece, spec):
                stop = min(start + spec.max_tile, piece.numel)
                if run and (alone or not scratch.fits(spec.scratch_bytes(stop - start))):
                    yield from batches(run)
                    run = []
                if not run:
                    scratch.clear()
                run.append(self._decode(spec, piece, start, stop, buffer, whole, scratch))
                if alone:
                    yield run
                    run = []
        yield from batches(run)

    def _decode(
        self,
        spec: ParamSpec,
        piece: Piece,
        start: int,
        stop: int,
        buffer: Tensor,
        whole: _Gradient,
        scratch: Scratch,
    ) -> Tile:
        """Return one tile (elements of the piece) with its state in the scratch."""
        target = whole.target if piece.whole else whole.target[start:stop]
        grad = part_of(whole.grad, piece, start, stop)
        views, decoded = tile_views(buffer, piece, start, stop, scratch)
        stored = self.records[piece.param].stored
        if spec.has_master:
            if MASTER in decoded and MASTER in stored:
                place = self._place(spec, MASTER, target, views[MASTER])
                self._note(spec, scratch.decode(decoded[MASTER], place))
            else:
                self._load_master(spec, self.records[piece.param], views[MASTER], target)
            wide = scratch.take(stop - start).as_strided(target.shape, views[MASTER].stride())
            grad = _widened(wide, grad, whole.bound.factor)
        for key in decoded.keys() & stored - {MASTER}:
            scratch.decode(decoded[key], Place())
        return self._tile(spec, piece, start, target, grad, views, whole.bound, decoded)

    def _tile(
        self,
        spec: ParamSpec,
        piece: Piece,
        start: int,
        target: Tensor,
        grad: Tensor,
        views: dict[str, Tensor],
        bound: Bound,
        decoded: Mapping[str, Decoded] = _NOTHING,
    ) -> Tile:
        record = self.records[piece.param]
        values = views[MASTER] if spec.has_master else target
        proxy = nn.Parameter(like(values, bound.whole))
        if attributes := vars(bound.param):  # rules ask what they are (tensor parallel, QKV)
            vars(proxy).update(attributes)
        proxy.grad = like(grad, bound.whole)
        start += piece.start
        state = working_copy(record.kept)
        if record.unplanned:
            state.update(record.unplanned.get(start, {}))
        for key, view in views.items():
            if key in record.stored and key != MASTER:
                state[key] = like(view, bound.whole)
        makes_state = self._makes_state(spec, piece.param)
        return Tile(spec, piece.param, start, target, proxy, state, views, decoded, makes_state)

    def _makes_state(self, spec: ParamSpec, param: int) -> bool:
        keeps_any = len(spec.states) > spec.has_master
        return keeps_any and self.records[param].stored <= _ONLY_MASTER

    def _load_master(self, spec: ParamSpec, record: Record, master: Tensor, param: Tensor) -> None:
        if MASTER not in record.stored:
            master.copy_(param)
        else:
            self._note(spec, follow_parameter(master, param))

    def _note(self, spec: ParamSpec, changed: Tensor | None) -> None:
        if changed is not None and (not changed.is_cpu or bool(changed)):
            self.changed.append((spec.name, changed))

    def _place(self, spec: ParamSpec, key: str, param: Tensor, view: Tensor) -> Place:
        if key == MASTER:
            return Place(in_memory_order(param, view.stride()))
        return Place(salt=salt(self.seed, self.step, f"{spec.name}/{key}"))


def _widened(wide: Tensor | None, grad: Tensor, factor: Tensor | None) -> Tensor:
    """Cast a gradient into float32 space, if there is any for it, and multiply it there."""
    if wide is None:
        return grad
    wide.copy_(grad)
    return wide if factor is None else wide.mul_(factor)


def _starts(piece: Piece, spec: ParamSpec) -> range:
    """Return where the tiles of an encoded piece start; one that is empty has one."""
    return range(0, max(1, piece.numel), max(1, spec.max_tile))
