"""Sizes: as people write them ("64MiB") to bytes and back, and up to a multiple."""

from __future__ import annotations

import re
from fractions import Fraction

from optstream.errors import ConfigError

_FACTORS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "P": 2**50,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


PAGE_BYTES = 4096
"""What headers, windows and transfers are multiples of, in files and in memory."""


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return a size in bytes.

    Args:
        size: bytes as an int, or a text such as "64MiB", "1.5 GiB", "64M" (binary) or "500MB"
            (decimal).
        name: what the size is for, named in the error.

    Raises:
        ConfigError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f'{name}={size!r} is not a size; give bytes or a text such as "64MiB"')
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f'{name}={size} is negative; give bytes or a text such as "64MiB"')
        return size
    match = _SIZE.fullmatch(size)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f'{name}={size!r} is not a size; give bytes or a text such as "64MiB", "2GiB", "500MB"'
        )
    num_bytes = Fraction(match[1]) * factor  # floats would take 4.35GB for a broken number
    if num_bytes.denominator != 1:
        raise ConfigError(f"{name}={size!r} is not a whole number of bytes")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """Return bytes as people read them, in binary units: 10.8 GiB, 64.0 MiB, 512 B."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(value), 1) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def aligned(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not less than `value`."""
    return -(-value // alignment) * alignment
