"""One tensor of a window file: what is said of it, and what safetensors is told.

What safetensors cannot say (state key, logical dtype, place in the whole tensor) is a JSON text per
tensor in `__metadata__`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, TypeGuard

from optstream.errors import FormatError

EXTENT_ALIGN_BYTES = 64
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
    "stored_dtype": str,
    "stored_numel": int,
    "shape": list,
    "global_shape": list,
    "start": int,
    "stride": list,
}
_SIZES = ("shape", "global_shape", "stride")
_OPTIONAL = {"stride", "stored_dtype", "stored_numel"}
EXACT = "exact"


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
        codec: how the bytes encode the values; EXACT is the values themselves.
        stored_dtype, stored_numel: what the bytes of another codec are shown as to safetensors
            readers; None where exact.
    """

    fqn: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: int
    offset: int
    stride: tuple[int, ...] | None = None
    codec: str = EXACT
    stored_dtype: str | None = None
    stored_numel: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return its bytes as stored."""
        if self.stored_dtype is None or self.stored_numel is None:
            return self.numel * _DTYPES[self.dtype][2]
        return self.stored_numel * _DTYPES[self.stored_dtype][2]

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


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype without the prefix; `getattr(torch, name)` is the way back.

    Raises:
        FormatError: a dtype that no window file can hold.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise FormatError(f"{dtype} cannot be stored in a window file; known: {', '.join(_DTYPES)}")
    return name


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


def check_record(record: TensorRecord, path: str) -> None:
    """Raise FormatError unless the record agrees with itself."""
    what = f"{record.fqn}/{record.key}"
    if record.dtype not in _DTYPES:
        fault(path, f"{what!r} has the unknown dtype {record.dtype!r}")
    if min((record.start, record.offset, *record.shape, *record.global_shape)) < 0:
        fault(path, f"{what!r} has a negative size or offset")
    if record.start + record.numel > prod(record.global_shape):
        fault(path, f"{what!r} ends behind the whole tensor of shape {record.global_shape}")
    if record.offset % EXTENT_ALIGN_BYTES:
        fault(path, f"{what!r} lies at {record.offset}, no multiple of {EXTENT_ALIGN_BYTES}")
    stored = (record.stored_dtype, record.stored_numel)
    if any((value is None) != (record.codec == EXACT) for value in stored):
        fault(path, f"{what!r} has the codec {record.codec!r} and is stored as {stored}")
    if record.stored_dtype is not None and record.stored_dtype not in _DTYPES:
        fault(path, f"{what!r} is stored as the unknown dtype {record.stored_dtype!r}")
    if record.stride is not None and not is_dense(record.shape, record.stride):
        fault(path, f"{what!r} of shape {record.shape} is not dense: strides {record.stride}")


def stored_as(record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape that a safetensors reader sees."""
    if record.stored_dtype is not None and record.stored_numel is not None:
        return _DTYPES[record.stored_dtype][0], (record.stored_numel,)
    dtype, pair, _ = _DTYPES[record.dtype]
    return dtype, (record.shape if record.stride is None else (record.numel,)) + pair


def describe(record: TensorRecord) -> str:
    fields = {name: getattr(record, name) for name in _FIELDS}
    return json.dumps({k: v for k, v in fields.items() if v is not None}, separators=(",", ":"))


def parse_record(name: str, text: object, entry: object, path: str) -> TensorRecord:
    """Return the record of one tensor; only types are checked here, `_entries` checks the rest."""
    fields = load_object(text, path, f"the description of {name!r}")
    if not set(_FIELDS) - _OPTIONAL <= set(fields) <= set(_FIELDS):
        fault(path, f"the description of {name!r} has the fields {sorted(fields)}")
    for key, value in fields.items():
        if not (_is_sizes(value) if key in _SIZES else type(value) is _FIELDS[key]):
            fault(path, f"{name!r} has {key} = {value!r}")
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_sizes(offsets) or len(offsets) != 2:
        fault(path, f"{name!r} has no place in the file")
    sizes = {key: tuple(fields[key]) for key in _SIZES if key in fields}
    record = TensorRecord(offset=offsets[0], **{**fields, **sizes})
    check_record(record, path)
    if record.name != name:
        fault(path, f"{name!r} is described as {record.name!r}")
    return record


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def load_object(text: object, path: str, what: str) -> dict[str, Any]:
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
        fault(path, f"{what} is not JSON: {error}")
    if not isinstance(value, dict):
        fault(path, f"{what} is no JSON object")
    return value


def fault(path: str, text: str) -> NoReturn:
    raise FormatError(f"{path}: {text}")
