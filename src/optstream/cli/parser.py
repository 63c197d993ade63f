"""argparse with one line an error, and the types of our flags."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from optstream.errors import ConfigError
from optstream.units import parse_bytes

_BITS = re.compile(r"([KMGTP]b|bits?)(/s)?$")
"""As drives' links are rated; sizes are read in any case otherwise."""


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and says what is wrong in one line, exit code 2."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def given_path(text: str) -> Path:
    """Parse a path; none at all, as of a shell's variable that is not set, is no directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a path")
    return Path(text)


def non_empty(text: str) -> str:
    """Refuse a text that is none, as of a shell's variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a value")
    return text


def window_size(text: str) -> int:
    """Parse a size that a window can have."""
    from optstream.plan import parse_window_bytes  # with torch, which takes a second

    try:
        return parse_window_bytes(parse_bytes(text, "window"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size(text: str) -> int:
    """Parse a size that is not nothing."""
    try:
        num_bytes = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if num_bytes == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing; give a size above 0")
    return num_bytes


def bytes_per_s(text: str) -> int:
    """Parse a rate: a size, with "/s" behind it or not."""
    if _BITS.search(text):
        raise argparse.ArgumentTypeError(f'{text!r} are bits; give bytes, for example "2.5GB/s"')
    return size(text.removesuffix("/s"))


def ram_budget(text: str) -> str:
    """Check what may stay in memory between steps."""
    from optstream.ram import Ram  # with torch

    try:
        Ram(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def budget(text: str) -> str:
    """Check what may stay in memory on another machine, whose "auto" nobody knows."""
    from optstream.ram import parse_budget  # with torch

    try:
        parse_budget(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range, its ends included."""

    def parse(text: str) -> int:
        wrong = f"{text!r} is not a whole number from {lowest} to {highest}"
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(wrong) from None
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(wrong)
        return number

    return parse


def number_above(lowest: float, *, or_equal: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers above a bound."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < lowest or (number == lowest and not or_equal):
            above = "at least" if or_equal else "above"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {above} {lowest:g}")
        return number

    return parse
