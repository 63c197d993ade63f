"""The window file: bytes <-> names, shapes, dtypes."""

from optstream.format.header import (
    WindowHeader,
    build_header,
    header_size,
    parse_header,
    read_header,
    starts_like_ours,
)
from optstream.format.record import TensorRecord, dtype_name, is_dense

__all__ = [
    "TensorRecord",
    "WindowHeader",
    "build_header",
    "dtype_name",
    "header_size",
    "is_dense",
    "parse_header",
    "read_header",
    "starts_like_ours",
]
