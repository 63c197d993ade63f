"""The inner torch optimizer as optstream is given it: over model parameters, without masters.

Its groups have the bfloat16 (float16) parameters in place of Megatron's masters, so that windows
carry the masters, gradients are cast window by window, and what an update gives is written to the
model parameter or to this rank's part of DDP's parameter buffer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optstream.bound import ScaledGradient
from optstream.integrations.megatron.gradients import Gradients
from optstream.integrations.megatron.held import Groups
from optstream.layout import hyperparameters

_ELEMENTWISE = ("FusedAdam", "Lion")
"""Rules of Transformer Engine, Apex and emerging-optimizers that flat slices may be given to."""

_WHOLE = ("OrthogonalizedOptimizer",)
"""Rules that update parameters apart from each other and need their matrices."""


class OverModelParams:
    """A copy of an inner optimizer whose groups hold model parameters; hyperparameters are shared.

    Attributes:
        optimizer: to be wrapped by `offload`.
    """

    def __init__(
        self, inner: Optimizer, held: Groups, names: Mapping[int, str], gradients: Gradients
    ) -> None:
        """Make it.

        Args:
            inner: what Megatron steps.
            held: in its groups.
            names: of model parameters by `id`; one without is named by its position.
            gradients: of what is held.
        """
        self._inner = inner
        self._held = held
        self._gradients = gradients
        self._today: dict[int, Tensor | ScaledGradient] = {}
        # copy.copy goes through torch's __getstate__, which keeps only groups, state and defaults
        self.optimizer = copy.copy(inner)
        own = vars(self.optimizer)
        own.update(vars(inner))
        own.update(
            state=defaultdict(dict),
            param_groups=[
                {
                    "params": [one.target() for one in group],
                    "param_names": [
                        names.get(id(one.param), f"group{g}.param{i}")
                        for i, one in enumerate(group)
                    ],
                }
                for g, group in enumerate(held)
            ],
            is_share=True,
            gradient_of=lambda target: self._today.get(id(target)),
        )
        kinds = {kind.__name__ for kind in type(inner).__mro__}
        if not kinds.isdisjoint((*_ELEMENTWISE, *_WHOLE)):
            elementwise = not kinds.isdisjoint(_ELEMENTWISE)
            own["is_elementwise"] = lambda group: elementwise
        if "FusedAdam" in kinds:
            own["layout_twin"] = lambda: _AdamTwin(inner)
        self.pull()

    def pull(self) -> None:
        """Take today's hyperparameters, parameters and gradients."""
        self._today.clear()
        groups = self.optimizer.param_groups
        for own, public, held in zip(groups, self._inner.param_groups, self._held, strict=True):
            kept = {key: own[key] for key in ("params", "param_names")}
            own.clear()
            own.update(hyperparameters(public), **kept)
            for target, one in zip(own["params"], held, strict=True):
                one.follow(target)
                gradient = self._gradients.of(one)
                if gradient is not None:
                    self._today[id(target)] = gradient

    def push(self) -> None:
        """Give back what a step changed in the groups (a counter)."""
        groups = self.optimizer.param_groups
        for own, public in zip(groups, self._inner.param_groups, strict=True):
            public.update(hyperparameters(own))


class _AdamTwin(Optimizer):
    """Keeps what the fused Adams keep; their own kernels know real devices only."""

    def __init__(self, fused: Optimizer) -> None:
        super().__init__([torch.empty(0)], dict(fused.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                for key in ("exp_avg", "exp_avg_sq"):
                    if key not in self.state[param]:
                        self.state[param][key] = torch.zeros_like(param, dtype=torch.float32)
