"""Sort a model's parameters into groups for `Muon`: matrices, and the rest for AdamW."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from optstream.errors import ConfigError
from optstream.muon.muon import OPTIONS
from optstream.muon.roles import Role, roles
from optstream.muon.splits import block_shapes

_log = logging.getLogger(__name__)

Overrides = Mapping[str, Mapping[str, Any]]


def muon_groups(
    model: nn.Module,
    *,
    lr: float | Tensor = 0.02,
    adamw_lr: float | Tensor = 3e-4,
    weight_decay: float = 0.0,
    adamw_weight_decay: float = 0.0,
    convolutions: bool = False,
    overrides: Overrides | None = None,
    table: bool = False,
) -> list[dict[str, Any]]:
    """Return parameter groups for `Muon`, every trainable parameter in exactly one.

    Muon's: weights of linear layers, of attention, of routers, and stacks of expert matrices, with
    the split rule and storage that the module's type tells. AdamW's: embeddings, output heads
    (tied or not), norms, biases, convolutions, and what is not known. Parameters that share every
    option share a group. Frozen parameters are left out.

    Args:
        model: any module; its parameters may be on the meta device.
        lr: of Muon groups.
        adamw_lr: of AdamW groups.
        weight_decay: of Muon groups.
        adamw_weight_decay: of AdamW groups; vectors (norms, biases) get 0.
        convolutions: True: plain convolution kernels are Muon's, as (out, in * ...) matrices.
        overrides: options by pattern (fnmatch, on every FQN of a parameter), for example
            {"*.c_attn.weight": {"split": ("rows", (64, 16, 16))}, "head.*": {"use_muon": True}}.
            All that match apply, a later pattern over an earlier one.
        table: print `muon_table` of the result.

    Raises:
        ConfigError: a pattern that matches no parameter, an option that Muon does not have, a split
            that does not fit a shape.
    """
    rows = _choices(model, convolutions, overrides or {})
    if table:
        print(_format(rows))  # noqa: T201
    groups: list[dict[str, Any]] = []
    for role, chosen in rows:
        if chosen is None:
            continue
        use_muon = chosen["use_muon"]
        vector = role.param.ndim < 2 or role.what in ("bias", "vector")
        options = {
            "lr": lr if use_muon else adamw_lr,
            "weight_decay": weight_decay if use_muon else 0.0 if vector else adamw_weight_decay,
            **chosen,
        }
        _append(groups, role, options)
    return groups


def muon_table(
    model: nn.Module, *, convolutions: bool = False, overrides: Overrides | None = None
) -> str:
    """Return what `muon_groups` decides, one line for each parameter, as plain text.

    Args:
        model: see `muon_groups`.
        convolutions: see `muon_groups`.
        overrides: see `muon_groups`.
    """
    return _format(_choices(model, convolutions, overrides or {}))


def _choices(
    model: nn.Module, convolutions: bool, overrides: Overrides
) -> list[tuple[Role, dict[str, Any] | None]]:
    """Return each parameter with the options of its group, None for a frozen one."""
    found = roles(model, convolutions)
    for pattern, options in overrides.items():
        _check_options(pattern, options)
        if not any(_matches(pattern, role) for role in found):
            raise ConfigError(
                f"override {pattern!r} matches none of the model's {len(found)} parameters; "
                f"names look like {found[0].name if found else '(none)'!r}, see muon_table(model)"
            )
    rows = [
        (role, _options(role, overrides) if role.param.requires_grad else None) for role in found
    ]
    _warn_fused(rows)
    return rows


def _check_options(pattern: str, options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ConfigError(
            f"override {pattern!r}: {unknown[0]!r} is no option of a Muon group; "
            f"use {', '.join(OPTIONS)}"
        )


def _options(role: Role, overrides: Overrides) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for pattern, options in overrides.items():
        if _matches(pattern, role):
            given.update(options)
    use_muon = given.get("use_muon", role.is_matrix)
    chosen: dict[str, Any] = {"use_muon": use_muon}
    if use_muon:
        shape_rule = {3: ("stack",), 4: ("flatten",), 5: ("flatten",)}.get(role.param.ndim)
        chosen |= {"split": shape_rule, "transposed": False, **role.options}
    chosen |= given
    if use_muon:
        try:
            block_shapes(role.param.shape, chosen["split"], chosen["transposed"])
        except ConfigError as error:
            raise ConfigError(f"{role.name!r}: {error}") from None
    return chosen


def _matches(pattern: str, role: Role) -> bool:
    return any(fnmatchcase(name, pattern) for name in role.aliases)


def _append(groups: list[dict[str, Any]], role: Role, options: dict[str, Any]) -> None:
    for group in groups:
        if all(_same(group.get(name), value) for name, value in options.items()) and (
            len(group) == len(options) + 2
        ):
            break
    else:
        group = {"params": [], "param_names": [], **options}
        groups.append(group)
    group["params"].append(role.param)
    group["param_names"].append(role.name)


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else bool(a == b)


def _warn_fused(rows: list[tuple[Role, dict[str, Any] | None]]) -> None:
    names = [
        role.name
        for role, chosen in rows
        if role.maybe_fused and chosen and chosen["use_muon"] and chosen["split"] is None
    ]
    if names:
        _log.warning(
            "%s%s: by name several matrices in one, but in an unknown layout, so it is updated as "
            "one matrix; give its split in overrides",
            names[0],
            f" and {len(names) - 1} more" if len(names) > 1 else "",
        )


def _format(rows: list[tuple[Role, dict[str, Any] | None]]) -> str:
    lines = [("parameter", "shape", "update", "matrices", "what it is")]
    for role, chosen in rows:
        name = role.name + "".join(f" = {alias}" for alias in role.aliases[1:])
        shape = "x".join(map(str, role.param.shape))
        update = "frozen" if chosen is None else "muon" if chosen["use_muon"] else "adamw"
        matrices = ""
        if chosen and chosen["use_muon"]:
            cut = block_shapes(role.param.shape, chosen["split"], chosen["transposed"])
            matrices = " + ".join(f"{n} of {m}x{k}" for n, m, k in cut)
        lines.append((name, shape, update, matrices, role.what))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
