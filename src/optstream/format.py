"""The window file: bytes <-> names, shapes, dtypes.

A window is one safetensors file, readable by any safetensors reader, and usable for direct I/O:

    0          8                   header_bytes             data_bytes behind it
    | length u64 | JSON, spaces ... | extent | pad | extent | ... | pad |
    '------ a multiple of 4096 -----'------ a multiple of 4096 --------'

safetensors allows no holes, so a `uint8` pad tensor fills each gap before an extent and at the end.
What safetensors cannot say (state key, logical dtype, place in the whole tensor) is a JSON text per
tensor in `__metadata__`. Nothing here touches torch or a drive.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, TypeGuard

from optstream.errors import FormatError

PAGE_BYTES = 4096
EXTENT_ALIGN_BYTES = 64
FORMAT_VERSION = "1"
MAX_JSON_BYTES = 100_000_000  # the safetensors reader refuses longer headers

_START = b'{"__metadata__":{"format":"pt","optstream":'

# torch's name -> (name in safetensors, extra last dimension, bytes an element). Complex numbers are
# stored as pairs; dtypes that safetensors or its readers lack are stored as bytes.
_DTYPES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "float64": ("F64", (), 8),
    "float32": ("F32", (), 4),
    "float16": ("F16", (), 2),
    "bfloat16": ("BF16", (), 2),
    "int64": ("I64", (), 8),
    "int32": ("I32", (), 4),
    "int16": ("I16", (), 2),
    "int8": ("I8", (), 1),
    "uint8": ("U8", (), 1),
    "uint16": ("U16", (), 2),
    "uint32": ("U32", (), 4),
    "uint64": ("U64", (), 8),
    "bool": ("BOOL", (), 1),
    "float8_e4m3fn": ("F8_E4M3", (), 1),
    "float8_e5m2": ("F8_E5M2", (), 1),
    "float8_e4m3fnuz": ("U8", (), 1),
    "float8_e5m2fnuz": ("U8", (), 1),
    "float8_e8m0fnu": ("U8", (), 1),
    "complex128": ("F64", (2,), 16),
    "complex64": ("F32", (2,), 8),
    "complex32": ("F16", (2,), 4),
}

# what `__metadata__` says of a tensor
_FIELDS: dict[str, type] = {
    "fqn": str,
    "key": str,
    "dtype": str,
    "codec": str,
    "shape": list,
    "global_shape": list,
    "start": int,
    "stride": list,
}
_SIZES = ("shape", "global_shape", "stride")


@dataclass(frozen=True)
class TensorRecord:
    """One extent: a piece of one state tensor and where it lies in the window's data.

    Attributes:
        fqn: name of the parameter.
        key: name of the state: "master", "exp_avg", ...
        dtype: logical dtype, torch's name without the prefix ("bfloat16"); see `dtype_name`.
        shape: of the piece.
        global_shape: of the whole state tensor.
        start: index of the piece's first element in the flat whole, in the order it has in memory.
        offset: bytes from the start of the window's data, a multiple of EXTENT_ALIGN_BYTES.
        stride: in elements, where the piece is dense but not in row-major order; else None. Such a
            piece is shown to safetensors readers as flat.
        codec: how the bytes encode the values; "exact" is the values themselves.
    """

    fqn: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: int
    offset: int
    stride: tuple[int, ...] | None = None
    codec: str = "exact"

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * _DTYPES[self.dtype][2]

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    @property
    def name(self) -> str:
        """Return the tensor's name in the file; a slice shows its flat range."""
        whole = f"{self.fqn}/{self.key}"
        if self.numel == prod(self.global_shape):
            return whole
        return f"{whole}[{self.start}:{self.start + self.numel}]"


@dataclass(frozen=True)
class WindowHeader:
    """What a window file says about itself."""

    records: tuple[TensorRecord, ...]
    header_bytes: int
    data_bytes: int


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype without the prefix; `getattr(torch, name)` is the way back.

    Raises:
        FormatError: a dtype that no window file can hold.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise FormatError(f"{dtype} cannot be stored in a window file; known: {', '.join(_DTYPES)}")
    return name


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
        _fault(
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
        _fault(path, f"the header ends after {len(head)} of {header_bytes} bytes")
    entries = _load_object(head[8:header_bytes], path, "header")
    metadata = entries.get("__metadata__")
    if not isinstance(metadata, dict) or "optstream" not in metadata:
        _fault(path, "no optstream metadata; another program's safetensors file?")
    if metadata["optstream"] != FORMAT_VERSION:
        _fault(path, f"format version {metadata['optstream']!r}, this reads {FORMAT_VERSION!r}")
    names = [name for name in metadata if "/" in name]
    records = tuple(_parse_record(name, metadata[name], entries.get(name), path) for name in names)
    data_bytes = file_bytes - header_bytes
    # Records determine the header, so whatever differs from that one is a fault.
    wanted = _entries(records, data_bytes, path)
    for name in [*entries, *wanted]:
        if json.dumps(entries.get(name)) != json.dumps(wanted.get(name)):
            _fault(path, f"the entry of {name!r} does not fit the others")
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
        _fault(path, f"{file_bytes} bytes are no safetensors file")
    num_bytes = int.from_bytes(head[:8], "little")
    if num_bytes > MAX_JSON_BYTES or 8 + num_bytes > file_bytes:
        _fault(path, f"a header of {num_bytes} bytes in a file of {file_bytes} bytes; truncated?")
    if (8 + num_bytes) % PAGE_BYTES or file_bytes % PAGE_BYTES:
        _fault(path, f"header or file is no multiple of {PAGE_BYTES} bytes; truncated or not ours?")
    return 8 + num_bytes


def _fault(path: str, text: str) -> NoReturn:
    raise FormatError(f"{path}: {text}")


def _entries(records: Iterable[TensorRecord], data_bytes: int, path: str) -> dict[str, Any]:
    """Return the header as an object: records in order of offset, pads wherever there is a gap."""
    metadata = {"format": "pt", "optstream": FORMAT_VERSION}
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = num_pads = 0
    records = list(records)
    for record in records:
        _check_record(record, path)
    for record in sorted(records, key=lambda record: (record.offset, record.end)):
        if record.offset < position:
            _fault(path, f"{record.name!r} overlaps the extent before it")
        if record.name in entries:
            _fault(path, f"{record.name!r} is there twice")
        if record.offset > position:
            entries[f"pad{num_pads}"] = _entry("U8", (record.offset - position,), position)
            num_pads += 1
        entries[record.name] = _entry(*_stored_as(record), record.offset, record.num_bytes)
        metadata[record.name] = _describe(record)
        position = record.end
    if data_bytes % PAGE_BYTES or data_bytes < position:
        _fault(path, f"tensors end at byte {position} of {data_bytes}; truncated?")
    if data_bytes > position:
        entries[f"pad{num_pads}"] = _entry("U8", (data_bytes - position,), position)
    return entries


def _entry(
    dtype: str, shape: Sequence[int], offset: int, num_bytes: int | None = None
) -> dict[str, Any]:
    end = offset + (prod(shape) if num_bytes is None else num_bytes)
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}


def _stored_as(record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape that a safetensors reader sees."""
    dtype, pair, _ = _DTYPES[record.dtype]
    return dtype, (record.shape if record.stride is None else (record.numel,)) + pair


def _describe(record: TensorRecord) -> str:
    fields = {name: getattr(record, name) for name in _FIELDS}
    return json.dumps({k: v for k, v in fields.items() if v is not None}, separators=(",", ":"))


def _check_record(record: TensorRecord, path: str) -> None:
    """Raise FormatError unless the record agrees with itself."""
    what = f"{record.fqn}/{record.key}"
    if record.dtype not in _DTYPES:
        _fault(path, f"{what!r} has the unknown dtype {record.dtype!r}")
    if min((record.start, record.offset, *record.shape, *record.global_shape)) < 0:
        _fault(path, f"{what!r} has a negative size or offset")
    if record.start + record.numel > prod(record.global_shape):
        _fault(path, f"{what!r} ends behind the whole tensor of shape {record.global_shape}")
    if record.offset % EXTENT_ALIGN_BYTES:
        _fault(path, f"{what!r} lies at {record.offset}, no multiple of {EXTENT_ALIGN_BYTES}")
    if record.stride is not None and not is_dense(record.shape, record.stride):
        _fault(path, f"{what!r} of shape {record.shape} is not dense: strides {record.stride}")


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether a tensor with these strides covers its memory, each element once."""
    expected = 1
    if len(shape) != len(stride):
        return False
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def _parse_record(name: str, text: object, entry: object, path: str) -> TensorRecord:
    """Return the record of one tensor; only types are checked here, `_entries` checks the rest."""
    fields = _load_object(text, path, f"the description of {name!r}")
    if not set(_FIELDS) - {"stride"} <= set(fields) <= set(_FIELDS):
        _fault(path, f"the description of {name!r} has the fields {sorted(fields)}")
    for key, value in fields.items():
        if not (_is_sizes(value) if key in _SIZES else type(value) is _FIELDS[key]):
            _fault(path, f"{name!r} has {key} = {value!r}")
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_sizes(offsets) or len(offsets) != 2:
        _fault(path, f"{name!r} has no place in the file")
    sizes = {key: tuple(fields[key]) for key in _SIZES if key in fields}
    record = TensorRecord(offset=offsets[0], **{**fields, **sizes})
    _check_record(record, path)
    if record.name != name:
        _fault(path, f"{name!r} is described as {record.name!r}")
    return record


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _load_object(text: object, path: str, what: str) -> dict[str, Any]:
    """Return a JSON object without duplicate names, or raise FormatError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("a name is there twice")
        return names

    try:
        if not isinstance(text, str | bytes):
            raise TypeError("it is no text")
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, TypeError, RecursionError) as error:
        _fault(path, f"{what} is not JSON: {error}")
    if not isinstance(value, dict):
        _fault(path, f"{what} is no JSON object")
    return value
