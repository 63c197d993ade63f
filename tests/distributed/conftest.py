"""Every test here runs programs on ranks that are real processes."""

from distributed.group import outcomes, processes, ranks

__all__ = ["outcomes", "processes", "ranks"]
