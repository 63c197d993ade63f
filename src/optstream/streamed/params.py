"""The parameters of an optimizer: what the plan is told of them, and which tensors they are today.

Parameters are bound late, at every step: frameworks swap them or move their storage after wrapping.
A change is followed when the stored state still fits and is an error when it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optstream.bound import Bound, GradientOf, ScaledGradient
from optstream.codecs import EXACT, CodecChoice
from optstream.distributed.shards import check_shard_gradient, here
from optstream.errors import ConfigError, ModelChangedError, UnsupportedOptimizerError
from optstream.format import is_dense
from optstream.layout import Layout, find_layout
from optstream.plan import MASTER, ParamSpec, StateTensor
from optstream.streamed.gathered import gathered, of_part
from optstream.streamed.rule import ELEMENTWISE, is_elementwise

LOW_PRECISION = (torch.bfloat16, torch.float16)
Groups = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def parameter_names(
    groups: Groups, model: nn.Module | None, named: Mapping[tuple[int, int], str] | None = None
) -> dict[tuple[int, int], str]:
    """Return the name of each parameter: the model's FQN, the group's own, or its position.

    By (group, position), not by object: frameworks replace parameters by others.

    Args:
        named: parameters that have their names.

    Raises:
        ConfigError: two parameters have one name.
    """
    of_model = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    names = dict(named or {})
    for g, group in enumerate(groups):
        own = group.get("param_names") or [
            f"group{g}.param{i}" for i in range(len(group["params"]))
        ]
        for position, (param, name) in enumerate(zip(group["params"], own, strict=True)):
            names.setdefault((g, position), of_model.get(id(param), name))
    seen: set[str] = set()
    for name in names.values():
        if name in seen:
            raise ConfigError(
                f"two parameters are named {name!r}; give every parameter its own name"
            )
        seen.add(name)
    return names


class Describer:
    """Makes ParamSpecs; equal parameters of a group are looked into once."""

    def __init__(
        self,
        optimizer: Optimizer,
        master_weights: bool,
        device: str | None = None,
        codecs: CodecChoice | None = None,
    ) -> None:
        """Take an optimizer whose groups may grow later.

        Args:
            device: where the parameters will be, for those that are on the meta device now.
            codecs: how state is stored; None: all exact.
        """
        self._optimizer = optimizer
        self._master_weights = master_weights
        self._device = device
        self._codecs = codecs or CodecChoice(EXACT)
        # an optimizer whose kernels know real devices only has a method that gives another one,
        # which keeps the same state
        self._probed = getattr(optimizer, "layout_twin", lambda: optimizer)()
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._seen: dict[Any, Any] = {}

    def describe(self, name: str, group: int, position: int) -> ParamSpec:
        """Return what the plan needs to know of `param_groups[group]["params"][position]`.

        Raises:
            UnsupportedOptimizerError: a complex or sparse form that the rule cannot take, or a
            DTensor of which this rank's part cannot be updated by itself.
        """
        values = self._optimizer.param_groups[group]
        param = values["params"][position]
        together = gathered(name, param, self._optimizer, values)
        check_plain(name, param)
        whole, existing = param, self._optimizer.state.get(param, {})
        param = here(param)
        has_master = self._master_weights and param.dtype in LOW_PRECISION
        dtype = torch.float32 if has_master else param.dtype
        stride = torch.empty_like(param, device="meta").stride()
        if together is None:
            existing = {key: here(value) for key, value in existing.items()}
            layout = self._layout(group, param, stride, dtype, existing)
        else:
            layout = self._layout(group, whole, whole.stride(), dtype, existing)
            layout = of_part(name, layout, whole, param)
        states = layout.tensors
        if has_master:
            states = (StateTensor(MASTER, tuple(param.shape), stride, dtype), *states)
        return ParamSpec(
            name=name,
            group=group,
            position=position,
            shape=self._same(tuple(param.shape)),
            dtype=param.dtype,
            device=self._same(self._device or str(param.device)),
            states=self._same(tuple(self._encoded(name, param, state) for state in states)),
            counters=layout.counters,
            elementwise=self._can_slice(values, param, dtype, states),
            temporaries=layout.temporaries,
            first_bytes=layout.first_bytes,
            temporary_bytes=layout.temporary_bytes,
            gathered=together,
        )

    def _same(self, value: T) -> T:
        """Return the equal value that was seen first: there are tens of thousands of equal ones."""
        return self._seen.setdefault(value, value)  # type: ignore[no-any-return]

    def _encoded(self, name: str, param: Tensor, state: StateTensor) -> StateTensor:
        is_master = state.key == MASTER
        if is_master and not is_dense(tuple(param.shape), param.stride()):
            return state  # it shares no order of memory with its master
        of_master = param.dtype if is_master else None
        return replace(state, codec=self._codecs.choose(name, state.key, state.dtype, of_master))

    @property
    def advances_groups(self) -> bool:
        """Whether a step changes values of groups (a counter), also of those without gradients."""
        return any(layout.advances_group for layout in self._layouts.values())

    def _layout(
        self,
        group: int,
        param: Tensor,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        state: Mapping[str, Any],
    ) -> Layout:
        shape = tuple(param.shape)
        accelerated = torch.device(self._device or param.device).type != "cpu"
        key = (group, shape, stride, dtype, param.dtype, accelerated, tuple(state))
        if key not in self._layouts:
            values = self._optimizer.param_groups[group]
            if accelerated and type(self._optimizer) in ELEMENTWISE and not values.get("fused"):
                # torch's own choice there, where the user leaves it open
                values = {**values, "foreach": values.get("foreach") is not False}
            self._layouts[key] = find_layout(
                self._probed, values, shape, stride, dtype, state, param.dtype
            )
        return self._layouts[key]

    def _can_slice(
        self,
        group: Mapping[str, Any],
        param: Tensor,
        dtype: torch.dtype,
        states: Sequence[StateTensor],
    ) -> bool:
        # kernels on bfloat16 and float16 round differently in a vector's tail, so that a slice is
        # not bit-equal to the whole (SGD, RMSprop, ASGD); with masters they never see those types
        return (
            param.dim() > 0
            and param.is_contiguous()
            and dtype not in LOW_PRECISION
            and all(state.shape == tuple(param.shape) for state in states)
            and is_elementwise(self._optimizer, group)
        )


def check_plain(name: str, param: Tensor) -> None:
    """Refuse what is no plain dense tensor; the message names the parameter."""
    if param.layout != torch.strided or param.is_quantized:
        raise UnsupportedOptimizerError(
            f"{name} has layout {param.layout}, offload streams dense parameters only; "
            "use it without offload"
        )


def gradient_source(optimizer: Optimizer) -> GradientOf:
    """Return what gives a parameter's gradient.

    An optimizer whose gradients are elsewhere than in `.grad`, or of another dtype, says so itself
    with a method `gradient_of(param) -> Tensor | ScaledGradient | None`.
    """
    return getattr(optimizer, "gradient_of", None) or attrgetter("grad")


def bind(specs: Sequence[ParamSpec], groups: Groups, gradient_of: GradientOf) -> dict[int, Bound]:
    """Find today's tensor and gradient of every planned parameter that has a gradient.

    Raises:
        ModelChangedError: a parameter is gone, or has another shape or dtype than its state was
        made for. UnsupportedOptimizerError: a sparse gradient.
    """
    bound = {}
    for index, spec in enumerate(specs):
        params = groups[spec.group]["params"] if spec.group < len(groups) else []
        if spec.position >= len(params):
            raise ModelChangedError(
                f"{spec.name} was parameter {spec.position} of group {spec.group}, which now has "
                f"{len(params)} parameters; wrap the optimizer after the model is complete"
            )
        param = params[spec.position]
        grad = gradient_of(param)
        if grad is not None:
            grad, factor = grad if isinstance(grad, ScaledGradient) else (grad, None)
            assert factor is None or spec.has_master
            whole = None
            if hasattr(param, "placements") or hasattr(grad, "placements"):
                check_shard_gradient(spec.name, param, grad)
                whole = param if spec.gathered else None
                param, grad = here(param), here(grad)
            _check_same(spec, param)
            bound[index] = Bound(param, _dense_grad(spec, grad), factor, whole)
    return bound


def _check_same(spec: ParamSpec, param: Tensor) -> None:
    if param.shape != spec.shape or param.dtype != spec.dtype:
        raise ModelChangedError(
            f"{spec.name} is now {tuple(param.shape)} {param.dtype}, its state on the drive is for "
            f"{spec.shape} {spec.dtype}; wrap the optimizer after the model has its final shape "
            "and dtype (after fully_shard)"
        )
    if spec.elementwise and not param.is_contiguous():
        # a flat slice of it would be a copy, and its update lost
        raise ModelChangedError(
            f"{spec.name} is no longer contiguous (strides {param.stride()}), its state on the "
            "drive is in slices; wrap the optimizer after the model has its final memory format"
        )


def _dense_grad(spec: ParamSpec, grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise UnsupportedOptimizerError(
            f"the gradient of {spec.name} is sparse ({grad.layout}), offload streams dense "
            "gradients only; use sparse=False in the embedding"
        )
    return grad


def unplanned(
    planned: Iterable[tuple[int, int]], groups: Groups, state: Mapping[Tensor, Any]
) -> Iterator[tuple[int, int]]:
    """Yield (group, position) of parameters that need state and are not among those planned.

    Frozen parameters have none until they get a gradient, unless `state` has something for them.
    """
    planned = set(planned)
    for g, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            needs = param.requires_grad or param.grad is not None or state.get(param)
            if needs and (g, i) not in planned:
                yield g, i
