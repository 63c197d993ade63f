"""Megatron-core: its optimizers with masters and state on the drive; see docs/megatron.md.

Megatron itself is never imported here: what is needed of it is reached through the objects that
`setup` is given, so that forks and subclasses work as well.
"""

from optstream.integrations.megatron.arguments import add_arguments
from optstream.integrations.megatron.requirements import validate
from optstream.integrations.megatron.setup import Streamed, setup

__all__ = ["Streamed", "add_arguments", "setup", "validate"]
