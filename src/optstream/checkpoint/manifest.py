"""The manifest: what a snapshot holds, by parameter name, and where each piece lies.

    {"format": "optstream", "version": 1, "xxh3": "...", "body": {
        "optimizer": "torch.optim.adamw.AdamW", "step": 12, "rank_windows": [64],
        "piece_bytes": 8388608,
        "groups":  [{"params": ["h.0.weight", ...], "values": ...}, ...],
        "params":  {"h.0.weight": {"shape": [...], "dtype": "bfloat16",
                                   "kept": ..., "unplanned": ...,
                    "tensors": {"exp_avg": {"dtype": "float32", "shape": [...], "stride": null,
                                            "codec": "split" (absent: exact),
                                            "pieces": [[window, offset, start, numel], ...]}}}},
        "windows": [{"file": "rank00000/window00000.safetensors", "header_bytes": 4096,
                     "data_bytes": ...,
                     "digests": ["xxh3 of each piece_bytes, header first", ...]}]}}

`xxh3` is the digest of the body as written, so a changed manifest is noticed before it is believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from optstream.checkpoint.values import decode, encode
from optstream.codecs import CODECS, EXACT
from optstream.errors import FormatError
from optstream.format import dtype_name, is_dense
from optstream.plan import SLICE_ALIGNMENT, stored_bytes
from optstream.store.base import PAGE_BYTES

FORMAT = "optstream"
VERSION = 2
"""2: some tensors have a codec; where none has, the manifest is of version 1."""
_BODY, _END = ', "body": ', "}\n"
MARK = f'{{"format": "{FORMAT}"'.encode()
"""How every manifest begins."""
WINDOW_FILE = re.compile(r"rank\d{5}/window\d{5,}\.safetensors", re.ASCII)
_MAX_BYTES = 2**62
_MAX_PIECE_BYTES = 2**30


@dataclass(frozen=True)
class StoredPiece:
    """Where a flat range of a state tensor lies: bytes from `offset` of a window's data."""

    window: int
    offset: int
    start: int
    numel: int


@dataclass(frozen=True)
class StoredTensor:
    """One state tensor of a parameter.

    Attributes:
        shape, stride: elements; stride is None where the order is row-major.
        pieces: in order, covering every element once.
        codec: the name of how they are stored.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    pieces: tuple[StoredPiece, ...]
    codec: str = EXACT

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its values; `stored_bytes` are those in windows."""
        return self.numel * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return sum(stored_bytes(self.codec, piece.numel, self.dtype) for piece in self.pieces)


@dataclass(frozen=True)
class StoredParam:
    """A parameter's whole state: tensors in windows, and what was in memory.

    Attributes:
        kept: counters and Python values by key.
        unplanned: tensors the plan did not foresee, by the start of their tile, then by key.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: dict[str, StoredTensor]
    kept: dict[str, Any] = field(default_factory=dict)
    unplanned: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredWindow:
    """A window's file; `file` is relative to the checkpoint, "" for a window never written.

    Attributes:
        digests: xxh3 (64 bit) of the header, then of each `piece_bytes` of the data.
    """

    file: str
    header_bytes: int
    data_bytes: int
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a snapshot but the windows' bytes.

    Attributes:
        optimizer: the wrapped optimizer's class, with its module.
        step: steps taken since the state was new.
        rank_windows: how many of the windows each rank had; they stand in the order of the ranks.
        groups: param_groups; "params" are names.
    """

    optimizer: str
    step: int
    rank_windows: tuple[int, ...]
    piece_bytes: int
    groups: tuple[dict[str, Any], ...]
    params: dict[str, StoredParam]
    windows: tuple[StoredWindow, ...]

    @property
    def world_size(self) -> int:
        """Return how many ranks had a part of the state."""
        return len(self.rank_windows)

    def windows_of(self, rank: int) -> range:
        """Return the indices of a rank's windows."""
        first = sum(self.rank_windows[:rank])
        return range(first, first + self.rank_windows[rank])

    def to_json(self) -> bytes:
        """Return the manifest file's bytes.

        Raises:
            ConfigError: a hyperparameter or a Python value that JSON cannot hold exactly.
        """
        return _sealed(json.dumps(_body(self), separators=(",", ":")), self.version)

    @property
    def version(self) -> int:
        """Return the first version of the format that holds all that is in it."""
        tensors = [tensor for param in self.params.values() for tensor in param.tensors.values()]
        return VERSION if any(tensor.codec != EXACT for tensor in tensors) else 1

    @staticmethod
    def from_json(data: bytes, path: str) -> Manifest:
        """Read a manifest file, believing nothing unchecked.

        Raises:
            FormatError: damaged, another program's, or a newer version's; `path` is named.
        """
        try:
            document = json.loads(data)
            known = document["format"] == FORMAT
            version = document["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{path} is no optstream manifest: {error!r}") from error
        if not known or type(version) is not int or version < 1:
            raise FormatError(f"{path} is no optstream manifest")
        if version > VERSION:
            raise FormatError(
                f"{path} has version {version}, this reads up to {VERSION}; update optstream"
            )
        text = data.decode().split(_BODY, 1)[-1].removesuffix(_END)
        if _sealed(text, version) != data:
            raise FormatError(f"{path} was changed after it was written: its digest does not fit")
        try:
            manifest = _parse(document["body"], path)
            _check(manifest)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise FormatError(f"{path} is malformed: {error!r}") from error
        return manifest


def _sealed(body: str, version: int) -> bytes:
    digest = xxhash.xxh3_64_hexdigest(body.encode())
    head = json.dumps({"format": FORMAT, "version": version, "xxh3": digest})
    return (head[:-1] + _BODY + body + _END).encode()


def _body(manifest: Manifest) -> dict[str, Any]:
    return {
        "optimizer": manifest.optimizer,
        "step": manifest.step,
        "rank_windows": list(manifest.rank_windows),
        "piece_bytes": manifest.piece_bytes,
        "groups": [
            {
                "params": group["params"],
                "values": encode(
                    {key: value for key, value in group.items() if key != "params"},
                    f"param_groups[{index}]",
                ),
            }
            for index, group in enumerate(manifest.groups)
        ],
        "params": {name: _param_json(name, param) for name, param in manifest.params.items()},
        "windows": [
            {
                "file": window.file,
                "header_bytes": window.header_bytes,
                "data_bytes": window.data_bytes,
                "digests": [f"{digest:016x}" for digest in window.digests],
            }
            for window in manifest.windows
        ],
    }


def _param_json(name: str, param: StoredParam) -> dict[str, Any]:
    return {
        "shape": list(param.shape),
        "dtype": dtype_name(param.dtype),
        "kept": encode(param.kept, f"the state of {name}"),
        "unplanned": encode(param.unplanned, f"the state of {name}"),
        "tensors": {
            key: {
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": None if tensor.stride is None else list(tensor.stride),
                **({} if tensor.codec == EXACT else {"codec": tensor.codec}),
                "pieces": [
                    [piece.window, piece.offset, piece.start, piece.numel]
                    for piece in tensor.pieces
                ],
            }
            for key, tensor in param.tensors.items()
        },
    }


def _parse(body: dict[str, Any], path: str) -> Manifest:
    return Manifest(
        optimizer=_text(body["optimizer"]),
        step=_size(body["step"]),
        rank_windows=_sizes(body["rank_windows"]),
        piece_bytes=_size(body["piece_bytes"]),
        groups=tuple(
            {**decode(group["values"], path), "params": [_text(name) for name in group["params"]]}
            for group in body["groups"]
        ),
        params={name: _parse_param(param, path) for name, param in body["params"].items()},
        windows=tuple(
            StoredWindow(
                file=_text(window["file"]),
                header_bytes=_size(window["header_bytes"]),
                data_bytes=_size(window["data_bytes"]),
                digests=tuple(int(digest, 16) for digest in window["digests"]),
            )
            for window in body["windows"]
        ),
    )


def _parse_param(param: dict[str, Any], path: str) -> StoredParam:
    return StoredParam(
        shape=_sizes(param["shape"]),
        dtype=getattr(torch, dtype_name(param["dtype"])),
        kept=decode(param["kept"], path),
        unplanned=decode(param["unplanned"], path),
        tensors={
            key: StoredTensor(
                dtype=getattr(torch, dtype_name(tensor["dtype"])),
                shape=_sizes(tensor["shape"]),
                stride=None if tensor["stride"] is None else _sizes(tensor["stride"]),
                pieces=tuple(StoredPiece(*_sizes(piece)) for piece in tensor["pieces"]),
                codec=_codec(tensor.get("codec", EXACT), path),
            )
            for key, tensor in param["tensors"].items()
        },
    )


def _codec(name: object, path: str) -> str:
    if name != EXACT and name not in CODECS:
        raise FormatError(f"{path} has the unknown codec {name!r}; update optstream")
    return str(name)


def _sizes(values: list[int]) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless files stay inside, and pieces cover tensors and lie in windows."""
    if not manifest.rank_windows or sum(manifest.rank_windows) != len(manifest.windows):
        raise ValueError(f"{len(manifest.windows)} windows are not those of the ranks")
    if not PAGE_BYTES <= manifest.piece_bytes <= _MAX_PIECE_BYTES:
        raise ValueError(f"pieces of {manifest.piece_bytes} bytes")
    for window in manifest.windows:
        _check_window(window, manifest.piece_bytes)
    for name, param in manifest.params.items():
        _check_kept(name, param)
        for key, tensor in param.tensors.items():
            _check_tensor(f"{name}/{key}", tensor, manifest.windows)
    for group in manifest.groups:
        missing = [name for name in group["params"] if name not in manifest.params]
        if missing:
            raise ValueError(f"a group names {missing[0]!r}, which is not there")


def _check_kept(name: str, param: StoredParam) -> None:
    of_tiles = param.unplanned.values() if isinstance(param.unplanned, dict) else [None]
    if not all(isinstance(values, dict) for values in (param.kept, *of_tiles)):
        raise TypeError(f"what is kept for {name} has no keys")
    if not all(isinstance(value, Tensor) for values in of_tiles for value in values.values()):
        raise TypeError(f"an unplanned state of {name} is no tensor")


def _check_window(window: StoredWindow, piece_bytes: int) -> None:
    if not window.file:
        return
    if not WINDOW_FILE.fullmatch(window.file):
        raise ValueError(f"{window.file!r} is no window's file in a checkpoint")
    sizes = (window.header_bytes, window.data_bytes, piece_bytes)
    if any(size % PAGE_BYTES or not 0 <= size <= _MAX_BYTES for size in sizes):
        raise ValueError(f"{window.file!r} has sizes of {sizes}, which are no pages")
    count = 1 + -(-window.data_bytes // piece_bytes)
    if window.header_bytes == 0 or len(window.digests) != count:
        raise ValueError(f"{window.file!r} has {len(window.digests)} digests, not {count}")


def _check_tensor(name: str, tensor: StoredTensor, windows: Sequence[StoredWindow]) -> None:
    end = 0
    if tensor.codec != EXACT and tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tensor.dtype} and stored as {tensor.codec}")
    for piece in tensor.pieces:
        window = windows[piece.window]
        num_bytes = stored_bytes(tensor.codec, piece.numel, tensor.dtype)
        alignment = PAGE_BYTES if len(tensor.pieces) > 1 else tensor.dtype.itemsize
        fits = piece.offset + num_bytes <= window.data_bytes and window.file
        if piece.start != end or not fits or piece.offset % alignment:
            raise ValueError(f"a piece of {name} is misplaced")
        end += piece.numel
        unit = num_bytes % PAGE_BYTES if tensor.codec == EXACT else piece.numel % SLICE_ALIGNMENT
        if end < tensor.numel and unit:
            raise ValueError(f"a piece of {name} ends inside a page or a block")
    if end != math.prod(tensor.shape):
        raise ValueError(f"the pieces of {name} hold {end} elements")
    if tensor.stride is not None and not is_dense(tensor.shape, tensor.stride):
        raise ValueError(f"{name} of shape {tensor.shape} is not dense: strides {tensor.stride}")
