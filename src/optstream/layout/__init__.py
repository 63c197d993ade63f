"""What state an optimizer will keep for a parameter, and how its step runs elsewhere."""

from optstream.layout.probe import Layout, find_layout
from optstream.layout.shell import (
    Shell,
    changed_values,
    copied_values,
    hyperparameters,
    is_streamed,
    kept_value,
    step_on,
)

__all__ = [
    "Layout",
    "Shell",
    "changed_values",
    "copied_values",
    "find_layout",
    "hyperparameters",
    "is_streamed",
    "kept_value",
    "step_on",
]
