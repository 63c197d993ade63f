"""Keep a torch optimizer's state in files on a drive and stream it through a few buffers."""

__version__ = "0.1.0.dev0"
