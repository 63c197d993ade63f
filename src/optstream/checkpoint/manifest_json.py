"""The manifest as a file, JSON; one that is read is believed only where it was checked.

    {"format": "optstream", "version": 1, "xxh3": "...", "body": {
        "optimizer": "torch.optim.adamw.AdamW", "step": 12, "rank_windows": [64],
        "piece_bytes": 8388608,
        "groups":  [{"params": ["h.0.weight", ...], "values": ...}, ...],
        "params":  {"h.0.weight": {"shape": [...], "dtype": "bfloat16",
                                   "kept": ..., "unplanned": ...,
                    "tensors": {"exp_avg": {"dtype": "float32", "shape": [...], "stride": null,
                                            "codec": "split" (absent: exact),
                                            "pieces": [[window, offset, start, numel], ...]
                           (or, sharded:)   "shards": [{"at": [[first, end, first, end, ...], ...],
                                                        "pieces": ...}, ...]}}}},
        "windows": [{"file": "rank00000/window00000.safetensors", "header_bytes": 4096,
                     "data_bytes": ...,
                     "digests": ["xxh3 of each piece_bytes, header first", ...]}]}}

`at` says in each dimension which ranges of indices a shard has (`distributed/region.py`).
`xxh3` is the digest of the body as written, so a changed manifest is noticed before it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from optstream.checkpoint.manifest import (
    VERSION,
    Manifest,
    StoredParam,
    StoredPiece,
    StoredShard,
    StoredTensor,
    StoredWindow,
)
from optstream.checkpoint.manifest_checks import check_manifest
from optstream.checkpoint.values import decode, encode
from optstream.codecs import CODECS, EXACT
from optstream.distributed.region import Region
from optstream.errors import FormatError
from optstream.format import dtype_name

FORMAT = "optstream"
_BODY, _END = ', "body": ', "}\n"
MARK = f'{{"format": "{FORMAT}"'.encode()
"""How every manifest begins."""


def to_json(manifest: Manifest) -> bytes:
    """Return the manifest file's bytes.

    Raises:
        ConfigError: a hyperparameter or a Python value that JSON cannot hold exactly.
    """
    return _sealed(json.dumps(_body(manifest), separators=(",", ":")), manifest.version)


def from_json(data: bytes, path: str) -> Manifest:
    """Read a manifest file, believing nothing unchecked.

    Raises:
        FormatError: damaged, another program's, or a newer version's; `path` is named.
    """
    try:
        text = data.decode()
        document = json.loads(text)
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
    if _sealed(text.split(_BODY, 1)[-1].removesuffix(_END), version) != data:
        raise FormatError(f"{path} was changed after it was written: its digest does not fit")
    try:
        manifest = _parse(document["body"], path)
        check_manifest(manifest)
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
                **_where_json(tensor),
            }
            for key, tensor in param.tensors.items()
        },
    }


def _where_json(tensor: StoredTensor) -> dict[str, Any]:
    shards = [
        {
            "at": [[end for side in ranges for end in side] for ranges in shard.region.ranges],
            "pieces": [[one.window, one.offset, one.start, one.numel] for one in shard.pieces],
        }
        for shard in tensor.shards
    ]
    return {"pieces": shards[0]["pieces"]} if tensor.is_whole else {"shards": shards}


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
                shards=tuple(_parse_shards(tensor)),
                codec=_codec(tensor.get("codec", EXACT), path),
            )
            for key, tensor in param["tensors"].items()
        },
    )


def _parse_shards(tensor: dict[str, Any]) -> Iterator[StoredShard]:
    if "pieces" in tensor:
        yield StoredShard(Region.whole(tensor["shape"]), _parse_pieces(tensor))
        return
    for shard in tensor["shards"]:
        ends = [_sizes(dim) for dim in shard["at"]]
        ranges = tuple(tuple(zip(dim[::2], dim[1::2], strict=True)) for dim in ends)
        yield StoredShard(Region(ranges), _parse_pieces(shard))


def _parse_pieces(shard: dict[str, Any]) -> tuple[StoredPiece, ...]:
    return tuple(StoredPiece(*_sizes(piece)) for piece in shard["pieces"])


def _codec(name: object, path: str) -> str:
    if name != EXACT and name not in CODECS:
        raise FormatError(f"{path} has the unknown codec {name!r}; update optstream")
    return str(name)


def _sizes(values: list[int]) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
