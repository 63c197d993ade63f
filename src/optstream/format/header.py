"""The window file: bytes <-> names, shapes, dtypes.

A window is one safetensors file, readable by any safetensors reader, and usable for direct I/O:

    0          8                   header_bytes             data_bytes behind it
    | length u64 | JSON, spaces ... | extent | pad | extent | ... | pad |
    '------ a multiple of 4096 -----'------ a multiple of 4096 --------'

safetensors allows no holes, so a `uint8` pad tensor fills each gap before an extent and at the end.
Nothing here touches torch; `record` has what is said of one tensor.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from optstream.format.record import (
    TensorRecord,
    check_record,
    describe,
    fault,
    load_object,
    parse_record,
    stored_as,
)
from optstream.units import PAGE_BYTES

FORMAT_VERSION = "1"
MAX_JSON_BYTES = 100_000_000  # the safetensors reader refuses longer headers
_START = b'{"__metadata__":{"format":"pt","optstream":'
"""Of every header that `build_header` makes, behind its length."""


@dataclass(frozen=True)
class WindowHeader:
    """What a window file says about itself."""

    records: tuple[TensorRecord, ...]
    header_bytes: int
    data_bytes: int


def build_header(records: Iterable[TensorRecord], data_bytes: int) -> bytes:
    """Return the header of a window file, padded with spaces to a multiple of PAGE_BYTES.

    Args:
        records: extents in any order, not overlapping.
        data_bytes: size of the data behind the header, a multiple of PAGE_BYTES.

    Raises:
        FormatError: a record that contradicts itself, another one, or `data_bytes`.
    """
    entries = _entries(records, data_bytes, "window header")
    text = json.dumps(entries, separators=(",", ":")).encode()
    num_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    if num_bytes > MAX_JSON_BYTES:
        fault(
            "window header", f"{len(entries)} tensors need {num_bytes} bytes; use smaller windows"
        )
    return num_bytes.to_bytes(8, "little") + text.ljust(num_bytes)


def starts_like_ours(head: bytes) -> bool:
    """Tell a window file, of any version, from another program's by its first bytes."""
    return head[8:].startswith(_START)


def parse_header(head: bytes, file_bytes: int, path: str) -> WindowHeader:
    """Return what a window file's first bytes say, believing none of it unchecked.

    Args:
        head: the file from its start, at least to the end of the header.
        file_bytes: the file's size.
        path: named in errors.

    Raises:
        FormatError: malformed, or not a window file of this version.
    """
    header_bytes = header_size(head, file_bytes, path)
    if len(head) < header_bytes:
        fault(path, f"the header ends after {len(head)} of {header_bytes} bytes")
    entries = load_object(head[8:header_bytes], path, "header")
    metadata = entries.get("__metadata__")
    if not isinstance(metadata, dict) or "optstream" not in metadata:
        fault(path, "no optstream metadata; another program's safetensors file?")
    if metadata["optstream"] != FORMAT_VERSION:
        fault(path, f"format version {metadata['optstream']!r}, this reads {FORMAT_VERSION!r}")
    names = [name for name in metadata if "/" in name]
    records = tuple(parse_record(name, metadata[name], entries.get(name), path) for name in names)
    data_bytes = file_bytes - header_bytes
    # Records determine the header, so whatever differs from that one is a fault.
    wanted = _entries(records, data_bytes, path)
    for name in [*entries, *wanted]:
        if json.dumps(entries.get(name)) != json.dumps(wanted.get(name)):
            fault(path, f"the entry of {name!r} does not fit the others")
    return WindowHeader(records, header_bytes, data_bytes)


def read_header(path: str | os.PathLike[str]) -> WindowHeader:
    """Return the checked header of a window file.

    Raises:
        FormatError: as `parse_header`.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        head = file.read(8)
        head += file.read(header_size(head, file_bytes, os.fspath(path)) - 8)
    return parse_header(head, file_bytes, os.fspath(path))


def header_size(head: bytes, file_bytes: int, path: str) -> int:
    """Return the header's size (length field included) from a file's first 8 bytes, checked.

    Raises:
        FormatError: too short a file, or a length that cannot be.
    """
    if len(head) < 8:
        fault(path, f"{file_bytes} bytes are no safetensors file")
    num_bytes = int.from_bytes(head[:8], "little")
    if num_bytes > MAX_JSON_BYTES or 8 + num_bytes > file_bytes:
        fault(path, f"a header of {num_bytes} bytes in a file of {file_bytes} bytes; truncated?")
    if (8 + num_bytes) % PAGE_BYTES or file_bytes % PAGE_BYTES:
        fault(path, f"header or file is no multiple of {PAGE_BYTES} bytes; truncated or not ours?")
    return 8 + num_bytes


def _entries(records: Iterable[TensorRecord], data_bytes: int, path: str) -> dict[str, Any]:
    """Return the header as an object: records in order of offset, pads wherever there is a gap."""
    metadata = {"format": "pt", "optstream": FORMAT_VERSION}
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = num_pads = 0
    records = list(records)
    for record in records:
        check_record(record, path)
    for record in sorted(records, key=lambda record: (record.offset, record.end)):
        if record.offset < position:
            fault(path, f"{record.name!r} overlaps the extent before it")
        if record.name in entries:
            fault(path, f"{record.name!r} is there twice")
        if record.offset > position:
            entries[f"pad{num_pads}"] = _entry("U8", (record.offset - position,), position)
            num_pads += 1
        entries[record.name] = _entry(*stored_as(record), record.offset, record.num_bytes)
        metadata[record.name] = describe(record)
        position = record.end
    if data_bytes % PAGE_BYTES or data_bytes < position:
        fault(path, f"tensors end at byte {position} of {data_bytes}; truncated?")
    if data_bytes > position:
        entries[f"pad{num_pads}"] = _entry("U8", (data_bytes - position,), position)
    return entries


def _entry(
    dtype: str, shape: Sequence[int], offset: int, num_bytes: int | None = None
) -> dict[str, Any]:
    end = offset + (prod(shape) if num_bytes is None else num_bytes)
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
