"""Keep a torch optimizer's state in files on a drive and stream it through a few buffers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optstream.checkpoint.verify import verify
    from optstream.errors import OffloadError
    from optstream.gradients import clip_grad_norm_, reduce_to_owner
    from optstream.muon import Muon, muon_groups, muon_table
    from optstream.optimizer import StreamedOptimizer
    from optstream.plan import Plan
    from optstream.report import StepReport
    from optstream.wrap import offload

__version__ = "0.1.0.dev0"

__all__ = [
    "Muon",
    "OffloadError",
    "Plan",
    "StepReport",
    "StreamedOptimizer",
    "clip_grad_norm_",
    "muon_groups",
    "muon_table",
    "offload",
    "reduce_to_owner",
    "verify",
]

_HOMES = {
    "Muon": "muon",
    "OffloadError": "errors",
    "Plan": "plan",
    "StepReport": "report",
    "StreamedOptimizer": "optimizer",
    "clip_grad_norm_": "gradients",
    "muon_groups": "muon",
    "muon_table": "muon",
    "offload": "wrap",
    "reduce_to_owner": "gradients",
    "verify": "checkpoint.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes a second, `--help` needs none."""
    if name not in _HOMES:
        raise AttributeError(f"module 'optstream' has no attribute {name!r}")
    value = getattr(import_module(f"optstream.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
