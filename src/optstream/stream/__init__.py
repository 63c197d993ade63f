"""Windows between the store and the update: the only room with threads or device streams."""

from optstream.store.base import Store
from optstream.stream.paged import PagedStream
from optstream.stream.pipeline import Stream

__all__ = ["AnyStream", "PagedStream", "Stream", "open_stream"]

AnyStream = Stream | PagedStream


def open_stream(store: Store, io_threads: int) -> AnyStream:
    """Return the stream that suits a store: slots, or the page cache."""
    return PagedStream(store, io_threads) if store.cached else Stream(store, io_threads)
