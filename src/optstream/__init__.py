"""Keep a torch optimizer's state in files on a drive and stream it through a few buffers."""

from optstream.checkpoint.verify import verify
from optstream.errors import OffloadError
from optstream.muon import Muon, muon_groups, muon_table
from optstream.optimizer import StreamedOptimizer, offload
from optstream.plan import Plan
from optstream.report import StepReport

__version__ = "0.1.0.dev0"

__all__ = [
    "Muon",
    "OffloadError",
    "Plan",
    "StepReport",
    "StreamedOptimizer",
    "muon_groups",
    "muon_table",
    "offload",
    "verify",
]
