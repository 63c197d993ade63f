"""Rules for a parameter that is really several matrices: which rows belong to which.

A rule is a tuple of plain values, so that it lives in `param_groups` and in any checkpoint:

| rule | parameter | matrices |
|---|---|---|
| None | (rows, cols) | one |
| ("equal", k) | (rows, cols) | k of rows / k consecutive rows: gate+up, heads, Q+K+V of one size |
| ("rows", (r1, r2, ...)) | (r1 + r2 + ..., cols) | one for each run of consecutive rows |
| ("grouped", g, (r1, r2, ...)) | (g (r1 + r2 + ...), cols) | one for each r: each of g groups has \
r1 rows of the first, then r2 of the second, ...: Megatron's QKV, interleaved gate+up |
| ("stack",), ("stack", rule) | (n, rows, cols) | n experts, each one matrix or cut by `rule` |
| ("flatten",) | (out, in, ...) | one of shape (out, in * ...): a convolution's kernel |

Rows are outputs. With `transposed=True` a parameter is stored as (in, out): rules cut its columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optstream.errors import ConfigError

RULES = (
    'None, ("equal", k), ("rows", (r1, ...)), ("grouped", g, (r1, ...)), ("stack",), '
    '("stack", rule) or ("flatten",)'
)


def blocks(tensor: Tensor, split: Any, transposed: bool = False) -> list[Tensor]:
    """Return views of a parameter, each holding matrices of one shape.

    Returns:
        Views of shape (n, k, g, r, cols): n * k matrices, each of g * r rows ("flatten" leaves cols
        as several dimensions, since a channels-last kernel has no flat view). Together they cover
        every element of `tensor` once.

    Raises:
        ConfigError: the rule is malformed or does not fit the shape; names both.
    """
    rule = as_rule(split)
    shape = tuple(tensor.shape)
    if rule == ("flatten",):
        _require(
            len(shape) > 2 and not transposed, rule, shape, "needs (out, in, ...), not transposed"
        )
        return [tensor[None, None, None]]
    if rule and rule[0] == "stack":
        _require(len(shape) == 3, rule, shape, "needs three dimensions")
        rule = rule[1] if rule[1:] else None
    else:
        _require(len(shape) == 2, rule, shape, "needs two dimensions")
        tensor = tensor[None]
    logical = tensor.mT if transposed else tensor
    return _cut_rows(logical, rule, shape)


def block_shapes(
    shape: Sequence[int], split: Any, transposed: bool = False
) -> list[tuple[int, int, int]]:
    """Return (number of matrices, rows, cols) of each block, without allocating.

    Raises:
        ConfigError: the rule does not fit.
    """
    views = blocks(torch.empty(tuple(shape), device="meta"), split, transposed)
    return [(n * k, g * r, math.prod(cols)) for n, k, g, r, *cols in (view.shape for view in views)]


def as_rule(split: Any) -> tuple[Any, ...] | None:
    """Return the rule with lists turned into tuples (a checkpoint read from JSON has lists).

    Raises:
        ConfigError: not a rule.
    """
    rule = _tuples(split)
    if rule is None:
        return None
    match rule:
        case ("equal", k) if _counts((k,)):
            pass
        case ("rows", tuple(rows)) if _counts(rows):
            pass
        case ("grouped", groups, tuple(rows)) if _counts((groups, *rows)) and rows:
            pass
        case ("stack",) | ("flatten",):
            pass
        case ("stack", None | ("equal" | "rows" | "grouped", *_) as inner):
            as_rule(inner)
        case _:
            raise ConfigError(f"split={split!r} is not a rule; use {RULES}")
    return rule  # type: ignore[no-any-return]


def _cut_rows(tensor: Tensor, rule: tuple[Any, ...] | None, shape: tuple[int, ...]) -> list[Tensor]:
    """Cut dimension -2 of (n, rows, cols) into views of shape (n, k, g, r, cols)."""
    rows = tensor.shape[-2]
    match rule:
        case ("equal", k):
            _require(rows % k == 0, rule, shape, f"{rows} rows are not a multiple of {k}")
            return [torch.unflatten(tensor, -2, (k, 1, rows // k))]
        case ("rows", parts):
            _require(sum(parts) == rows, rule, shape, f"{sum(parts)} rows are not {rows}")
            return [part[:, None, None] for part in torch.split(tensor, parts, -2)]
        case ("grouped", groups, parts):
            total = groups * sum(parts)
            _require(total == rows, rule, shape, f"{groups} x {sum(parts)} rows are not {rows}")
            grouped = torch.unflatten(tensor, -2, (groups, sum(parts)))
            return [part[:, None] for part in torch.split(grouped, parts, -2)]
    return [tensor[:, None, None]]


def _require(fits: bool, rule: tuple[Any, ...] | None, shape: tuple[int, ...], why: str) -> None:
    if not fits:
        raise ConfigError(
            f"split={rule!r} does not fit a parameter of shape {shape}: {why}; rules are {RULES}"
        )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _counts(rows: tuple[Any, ...]) -> bool:
    return bool(rows) and all(type(n) is int and n > 0 for n in rows)
