"""The `optstream` command: parse, call, print."""
