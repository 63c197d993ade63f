"""What a parameter keeps in memory between steps."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Record:
    """What one parameter keeps outside its window; parameters may share one that is complete.

    Attributes:
        stored: keys whose tensors in the window are valid.
        kept: counters and Python values.
        unplanned: tensors the layout did not foresee, by the start of their tile.
    """

    stored: frozenset[str] = frozenset()
    kept: dict[str, Any] = field(default_factory=dict)
    unplanned: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class SharedRecords:
    """One record for all parameters that keep the same: tens of thousands count the same steps."""

    def __init__(self) -> None:
        self._records: dict[Hashable, Record] = {}

    def share(self, record: Record) -> Record:
        """Return the record that equals this one, bit for bit: the first that was given."""
        values = None if record.unplanned else _values(record.kept.items())
        if values is None:
            return record
        return self._records.setdefault((record.stored, values), record)

    def clear(self) -> None:
        self._records.clear()


def _values(kept: Iterable[tuple[str, Any]]) -> Hashable:
    """Return what tells kept values from others; None where that takes more than a look."""
    values: list[Hashable] = []
    for key, value in kept:
        dtype = None
        if isinstance(value, Tensor):
            if not value.is_cpu or value.dim():  # an accelerator would have to be waited for
                return None
            dtype, value = value.dtype, value.item()
        if type(value) not in _PLAIN:
            return None
        values += (key, dtype, repr(value))  # -0.0 and 0.0 are equal, their bits are not
    return tuple(values)


def working_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of counters and Python values that may be changed."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }
