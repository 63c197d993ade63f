"""Windows between the store and the update: the only room with threads or device streams."""

from optstream.stream.scan import Stream

__all__ = ["Stream"]
