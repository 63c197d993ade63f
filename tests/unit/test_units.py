"""Sizes as people write them."""

from __future__ import annotations

import pytest

from optstream.errors import ConfigError
from optstream.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (12345, 12345),
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("64MiB", 64 * 2**20),
        (" 64 mib ", 64 * 2**20),
        ("64M", 64 * 2**20),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("4.35GB", 4_350_000_000),
        ("8.7TB", 8_700_000_000_000),
        ("2T", 2**41),
        ("3kb", 3000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        *("", "MiB", "-1", "-1MiB", "1 potato", "1e9", "0x10", "1,5GiB", "1.GiB", ".5GiB", "1MiB2"),
        *("inf", "nan", "1.5", "0.1KiB", "64 M iB", "9" * 5000, "٣MiB"),
        *(-1, True, None, 1.0, b"1", ["1"]),
    ],
)
def test_no_size(size: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(size, "window")  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"window={size!r} is ")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (64 * 2**20, "64.0 MiB"),
        (10.8 * 2**30, "10.8 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
