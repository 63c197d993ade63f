"""Give an optimizer state and hyperparameters that come from elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optstream.checkpoint.match import check_groups, compare, fitting
from optstream.checkpoint.snapshot import Snapshot
from optstream.layout import hyperparameters
from optstream.state import StreamedState


class Loader:
    """Checks what is given as a whole, then puts it.

    Attributes:
        broken: why the state is neither the old nor the new one; "" where it is whole.
    """

    def __init__(self, optimizer: Optimizer, state: StreamedState) -> None:
        self.broken = ""
        self._optimizer = optimizer
        self._state = state

    def check(
        self,
        source: str,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any] | None],
        strict: bool,
    ) -> None:
        """Hold given state against what the optimizer keeps.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        names = self.group_names()
        check_groups(source, groups, names)
        self._state.extend({name for name, state in states.items() if state})
        known = [name for group in names for name in group]
        compare(self._state.plan.params, states, known).settle(source, strict)

    def put(
        self,
        source: str,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any] | None],
    ) -> None:
        """Replace all state and hyperparameters by given ones that were checked."""
        specs = enumerate(self._state.plan.params)
        given = {i: fitting(spec, state) for i, spec in specs if (state := states.get(spec.name))}
        self._of_today(given)
        self.broken = f"loading {source} failed half-way; load it, or a checkpoint, again"
        self._state.put(given)
        self.set_groups(groups)
        self.broken = ""

    def _of_today(self, given: Mapping[int, dict[str, Any]]) -> None:
        """Let the optimizer bring state of an older torch into today's form (step as a tensor)."""
        state = defaultdict(dict, {self._state.param(i): state for i, state in given.items()})
        self._optimizer.__setstate__({"state": state})
        self._optimizer.state = defaultdict(dict)

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyperparameters; what is a tensor stays on its device."""
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            before = dict(group)
            group.clear()
            for key, value in hyperparameters(values).items():
                old = before.get(key)
                if isinstance(value, Tensor) and isinstance(old, Tensor):
                    value = value.to(old.device)
                group[key] = value
            group.update({k: before[k] for k in ("params", "param_names") if k in before})
        # fills what a state_dict of an older torch lacks
        self._optimizer.__setstate__({"param_groups": self._optimizer.param_groups})

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take a checkpoint's files as they are, if they are laid out like the plan."""
        if not self._state.adopt(snapshot):
            return False
        self.set_groups(snapshot.manifest.groups)
        self.broken = ""
        return True

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [
            [self._state.name(g, position) for position in range(len(group["params"]))]
            for g, group in enumerate(self._optimizer.param_groups)
        ]
