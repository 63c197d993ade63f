"""Run any torch optimizer on one window; what it keeps besides windows is in records."""

from optstream.update.decoding import stored_values
from optstream.update.master import follow_parameter
from optstream.update.record import Record, working_copy
from optstream.update.updater import Updater
from optstream.update.views import extent_view

__all__ = ["Record", "Updater", "extent_view", "follow_parameter", "stored_values", "working_copy"]
