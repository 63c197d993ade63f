"""What the plan is told: parameters, and the state an optimizer keeps for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import torch

from optstream.codecs import CODECS, EXACT
from optstream.units import aligned

MASTER = "master"
MAX_TILE = 2**20
"""Elements updated at once; temporaries stay in the processor's cache and out of the bound."""

ENCODED_TILE = 2**18
"""Elements decoded, updated and encoded at once where the rule allows, in the cache as well."""

SCRATCH_ALIGNMENT = 64
"""Bytes, as torch's own allocations."""

EXTENT_ALIGNMENT = 64
"""Bytes, as torch's own allocations: a matrix product may depend on its operands' alignment."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One streamed tensor of a parameter's state: the master, or what the optimizer keeps.

    Attributes:
        key: the optimizer's own key ("exp_avg"), or MASTER.
        shape, stride: elements, as the optimizer makes it for the whole parameter.
        dtype: as the optimizer makes it.
        codec: the name of how it is stored.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    codec: str = EXACT

    @property
    def num_bytes(self) -> int:
        """Return its bytes in memory; see `stored_bytes`."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return stored_bytes(self.codec, math.prod(self.shape), self.dtype)


def stored_bytes(codec: str, numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of an extent."""
    return numel * dtype.itemsize if codec == EXACT else CODECS[codec].stored_bytes(numel)


class Temporaries(Enum):
    """What one call of an optimizer's step allocates besides state."""

    NONE = "none"
    """Fused kernels: nothing."""
    ONE = "one"
    """A loop over parameters: what one of them needs, so that small tiles make it small."""
    BATCHED = "batched"
    """foreach: what all parameters of the call need."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Says that an update takes all parts of a parameter, which several ranks hold.

    Attributes:
        at_once: how many times the largest part one rank puts together at once.
        numel: elements of the largest part.
    """

    at_once: int
    numel: int


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the plan needs to know of a parameter.

    Attributes:
        name: FQN, or "group0.param3" where no name is known.
        group, position: where it stands in `param_groups`.
        shape, dtype, device: of the parameter itself.
        states: its streamed tensors.
        counters: keys of what the optimizer keeps in memory for it.
        elementwise: flat slices of it may be updated by themselves.
        temporaries: which temporaries of an update live at the same time.
        first_bytes: peak of what the first update allocates, the new state included.
        temporary_bytes: peak of what any later update allocates.
        gathered: where its matrices are put together for an update; `shape` is then that of this
            rank's part, the two peaks are those of the whole.
        numel, has_master, is_encoded: what follows from those, asked for at every step.
    """

    name: str
    group: int
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    states: tuple[StateTensor, ...]
    elementwise: bool
    counters: tuple[str, ...] = ()
    temporaries: Temporaries = Temporaries.ONE
    first_bytes: int = 0
    temporary_bytes: int = 0
    gathered: Gathered | None = None
    numel: int = field(init=False, repr=False, compare=False)
    has_master: bool = field(init=False, repr=False, compare=False)
    is_encoded: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        follows = {
            "numel": math.prod(self.shape),
            "has_master": any(state.key == MASTER for state in self.states),
            "is_encoded": any(state.codec != EXACT for state in self.states),
        }
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    @property
    def state_bytes(self) -> int:
        """Return its bytes as stored."""
        return sum(state.stored_bytes for state in self.states)

    @property
    def max_tile(self) -> int:
        """Elements of it that are updated at once: tiles only help rules that go one by one."""
        if self.elementwise and self.is_encoded:
            return ENCODED_TILE
        tiled = self.elementwise and self.temporaries is Temporaries.ONE
        return MAX_TILE if tiled else self.numel

    def of_tile(self, num_bytes: int, numel: int) -> int:
        """Return what a tile of so many elements has of what all of it takes."""
        return math.ceil(num_bytes * (numel / max(1, self.numel)))

    def scratch_bytes(self, numel: int) -> int:
        """Return what decoding takes to update so many elements at once: float32, tensor by tensor.

        Masters need their gradient in float32, too.
        """
        if not self.is_encoded:
            return 0
        sizes = [
            numel if self.elementwise else math.prod(state.shape)
            for state in self.states
            if state.codec != EXACT
        ]
        sizes += [numel] if self.has_master else []
        return sum(aligned(size * 4, SCRATCH_ALIGNMENT) for size in sizes)

    @property
    def largest_part_bytes(self) -> int:
        """Return the bytes that the largest part takes in a window."""
        assert self.gathered is not None
        return sum(
            aligned(stored_bytes(state.codec, self.gathered.numel, state.dtype), EXTENT_ALIGNMENT)
            for state in self.states
        )

    @property
    def exchange_bytes(self) -> int:
        """Return what bringing the whole together takes on the rank that updates it.

        It has the whole and the result, and a part of what every other rank puts together.
        """
        assert self.gathered is not None
        itemsize = max(4, *(state.dtype.itemsize for state in self.states))
        return 3 * self.gathered.at_once * self.gathered.numel * itemsize
