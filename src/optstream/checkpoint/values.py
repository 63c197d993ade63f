"""Python values and small tensors as JSON and back, exactly and without pickle."""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optstream.errors import ConfigError, FormatError
from optstream.format import dtype_name

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def encode(value: object, name: str) -> Json:
    """Return a value as JSON.

    Args:
        value: None, bool, int, float, complex, str, a dtype, a tensor, or
            tuples, lists and dicts of those.
        name: what it is, for the error.

    Raises:
        ConfigError: a type that could not be read back without pickle.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [encode(value.real, name), encode(value.imag, name)]}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case Tensor():
            return {"tensor": _encode_tensor(value)}
        case list():
            return [encode(item, name) for item in value]
        case tuple():
            return {"tuple": [encode(item, name) for item in value]}
        case Mapping():
            pairs = [[encode(key, name), encode(item, name)] for key, item in value.items()]
            return {"dict": pairs}
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which cannot be saved without pickle; "
        "use numbers, texts, tensors, lists, tuples or dicts"
    )


def decode(value: Json, name: str) -> Any:
    """Return what `encode` was given.

    Raises:
        FormatError: not what `encode` writes; `name` tells where.
    """
    if isinstance(value, list):
        return [decode(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        [(kind, content)] = value.items()
        match kind:
            case "float":
                return float(content)
            case "complex":
                return complex(*(decode(part, name) for part in content))
            case "dtype":
                return getattr(torch, dtype_name(content))
            case "tensor":
                return _decode_tensor(content)
            case "tuple":
                return tuple(decode(item, name) for item in content)
            case "dict":
                return {decode(key, name): decode(item, name) for key, item in content}
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, binascii.Error) as error:
        raise FormatError(f"{name} cannot be read: {error!r}") from error
    raise FormatError(f"{name} has the unknown kind {kind!r}; saved by a newer version?")


def _encode_tensor(tensor: Tensor) -> dict[str, Json]:
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "data": base64.b64encode(raw).decode(),
    }


def _decode_tensor(content: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, dtype_name(content["dtype"]))
    raw = bytearray(base64.b64decode(content["data"], validate=True))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(content["shape"]).clone()
