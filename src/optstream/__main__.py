"""`python -m optstream` is the `optstream` command."""

from optstream.cli.main import entry_point

entry_point()
