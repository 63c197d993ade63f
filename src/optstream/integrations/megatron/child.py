"""One of Megatron's optimizers with its masters and state on the drive.

What is rebound on the instance, and nothing else of Megatron's is changed:

    inner.step                            a streamed step, which also writes the model parameters
    _copy_main_params_to_model_params     nothing: the step has done it
    get_parameters, ...                   see gradients.py, where gradients need a cast
    state_dict, sharded_state_dict, ...   Megatron's own, looking at tensors from files
    load_state_dict, ...                  Megatron's own, filling a scratch file that is then put
    offload_to_cpu, restore_from_cpu      nothing: there is nothing to move

Gradients, norm, clipping, loss scaling and the gathers after a step stay Megatron's: they need the
masters as objects that have a `.grad`, which they remain, without storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optstream
from optstream.codecs import EXACT, SPLIT
from optstream.errors import ConfigError
from optstream.integrations.megatron.arguments import Storage
from optstream.integrations.megatron.exhibit import (
    States,
    exhibited,
    packed,
    scratch_copy,
    shown_states,
    unpacked,
)
from optstream.integrations.megatron.gradients import Gradients
from optstream.integrations.megatron.held import held_by
from optstream.integrations.megatron.inner import OverModelParams
from optstream.plan import MASTER

_READ = ("state_dict", "get_parameter_state_dp_zero", "get_parameter_state_dp_reshardable")
_WRITE = (
    "load_parameter_state_from_dp_zero",
    "load_parameter_state_from_dp_zero_legacy",
    "_copy_model_params_to_main_params",
)


class StreamedChild:
    """Streams one of Megatron's optimizers.

    Attributes:
        label: of its directory and its report.
        streamed: the StreamedOptimizer over its model parameters.
    """

    def __init__(
        self,
        child: Any,
        label: str,
        directory: Path,
        storage: Storage,
        names: Mapping[int, str],
        metrics: Path | None,
    ) -> None:
        """Move a child's masters and state to the drive.

        Raises:
            ConfigError, UnsupportedOptimizerError, StoreError: as from `optstream.offload`; the
                child is as it was.
        """
        self.label = label
        self._child = child
        self._inner = child.optimizer
        self._held = held_by(child)
        self._directory = directory
        self._scratch: States | None = None
        self._shown = False
        self._check_masters()
        gradients = Gradients(child, self._held)
        self._over = OverModelParams(self._inner, self._held, names, gradients)
        self.streamed = optstream.offload(
            self._over.optimizer,
            directory,
            window=storage.window,
            ram=storage.ram,
            codec=self._codec(storage.codec),
            metrics=metrics,
        )
        self._move_masters()
        self._rebind()

    def _check_masters(self) -> None:
        for one in (one for group in self._held for one in group if one.has_master):
            if one.tensor.untyped_storage().nbytes() != one.tensor.nbytes:
                raise ConfigError(
                    f"a master of shape {tuple(one.tensor.shape)} shares its storage with others "
                    "(fp8 parameters?) and cannot be moved to the drive"
                )

    def _codec(self, asked: str) -> str:
        # a rank may have been dealt none of the parameters that `split` is for
        narrow = [one for group in self._held for one in group if one.is_bfloat16]
        return EXACT if asked == SPLIT and not narrow else asked

    def _move_masters(self) -> None:
        """Put what the child holds into windows; only the gradients' places remain of masters."""
        state = self._inner.state
        specs = self.streamed.plan.params
        held = [self._held[spec.group][spec.position] for spec in specs]
        existing = {
            index: {**state.get(one.tensor, {}), **({MASTER: one.tensor} if one.has_master else {})}
            for index, one in enumerate(held)
        }
        self.streamed._state.put({index: values for index, values in existing.items() if values})
        for one in held:
            one.release()
        state.clear()

    def _rebind(self) -> None:
        child = self._child
        self._inner.step = self.step
        child._copy_main_params_to_model_params = _nothing
        child.offload_to_cpu = child.restore_from_cpu = _nothing
        child.sharded_state_dict = self._sharded(child.sharded_state_dict)
        child.load_state_dict = self._loading(child.load_state_dict)
        for name in (name for name in _READ if hasattr(child, name)):
            setattr(child, name, self._reading(getattr(child, name)))
        for name in (name for name in _WRITE if hasattr(child, name)):
            setattr(child, name, self._writing(getattr(child, name)))
        if hasattr(child, "_set_main_param_and_optimizer_states"):
            child._set_main_param_and_optimizer_states = self._with_own_step(
                child._set_main_param_and_optimizer_states
            )

    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient, and the model with it."""
        self._scratch = None
        self._over.pull()
        self.streamed.step()
        self._over.push()

    def save(self, path: Path) -> None:
        """Make a checkpoint of optstream's own of this rank's part."""
        self.streamed.save(path)

    def load(self, path: Path) -> None:
        """Take such a checkpoint, hyperparameters included."""
        self._scratch = None
        self._over.pull()
        self.streamed.load(path)
        self._over.push()

    # -- Megatron's own code on tensors from files ----------------------------------------------

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            with self._readable():
                return method(*args, **kwargs)

        return read

    def _writing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            with self._writable():
                return method(*args, **kwargs)

        return write

    def _loading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(state_dict: Any) -> Any:
            with self._writable(self._scratch):
                return method(state_dict)

        return load_state_dict

    def _sharded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def sharded_state_dict(
            model_sharded_state_dict: Any = None, is_loading: bool = False, **kwargs: Any
        ) -> Any:
            # what is given out to be filled comes back to load_state_dict
            self._scratch = self._scratch_copy() if is_loading else None
            with self._exhibited(self._scratch) if self._scratch else self._readable():
                return method(model_sharded_state_dict or {}, is_loading, **kwargs)

        return sharded_state_dict

    def _with_own_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def set_states(model_param: Any, tensors: Mapping[str, Any]) -> Any:
            # torch's AdamW has a step in the state; load_state_dict took the saved one from the
            # group, while `tensors` has none, or the one of before the load
            group, order = self._child.model_param_group_index_map[model_param]
            state = self._inner.state[self._inner.param_groups[group]["params"][order]]
            own = {"step": state["step"]} if "step" in state else {}
            return method(model_param, {**tensors, **own})

        return set_states

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._shown else self._exhibited(self._snapshot()):
            yield

    @contextlib.contextmanager
    def _writable(self, scratch: States | None = None) -> Iterator[None]:
        if self._shown:
            yield
            return
        self._scratch = None
        with self._exhibited(scratch or self._scratch_copy()):
            yield
            written = shown_states(self._child)
        self._put(written)

    def _put(self, states: States) -> None:
        self._over.pull()
        if all(set(of_one) <= {MASTER} for group in states for of_one in group):
            specs = self.streamed.plan.params
            masters = {i: states[spec.group][spec.position] for i, spec in enumerate(specs)}
            self.streamed._state.put({index: of_one for index, of_one in masters.items() if of_one})
            return
        self.streamed.load_state_dict(packed(self._over.optimizer.param_groups, states))

    @contextlib.contextmanager
    def _exhibited(self, states: States) -> Iterator[None]:
        self._shown = True
        try:
            with exhibited(self._child, self._held, states):
                yield
        finally:
            self._shown = False

    def _snapshot(self) -> States:
        self._over.pull()  # split masters are rebuilt from today's parameters
        return unpacked(self.streamed.state_dict())

    def _scratch_copy(self) -> States:
        return scratch_copy(self._directory, self.streamed.plan.params, self._snapshot())


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
