"""What a parameter keeps in memory between steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Record:
    """What one parameter keeps outside its window.

    Attributes:
        stored: keys whose tensors in the window are valid.
        kept: counters and Python values.
        unplanned: tensors the layout did not foresee, by the start of their tile.
    """

    stored: frozenset[str] = frozenset()
    kept: dict[str, Any] = field(default_factory=dict)
    unplanned: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def working_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of counters and Python values that may be changed."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }
