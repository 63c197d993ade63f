"""Checks of the options in Muon's parameter groups; all are plain values, for checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from optstream.distributed.parts import parts_of
from optstream.distributed.shards import check_sum
from optstream.errors import ConfigError
from optstream.muon.coefficients import COEFFICIENTS, as_table
from optstream.muon.sharded import is_scattered
from optstream.muon.splits import as_rule, block_shapes

MOMENTUM_MODES = ("ema", "classical")
ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral", None)
NS_DTYPES = ("float64", "float32", "bfloat16", "float16", None)
MAX_NS_STEPS = 100


def check_group(group: dict[str, Any]) -> None:
    """Check every option and, for `use_muon`, every shape; store dtypes and lists as plain values.

    Raises:
        ConfigError: names the option, its value and what is allowed.
        UnsupportedOptimizerError: a DTensor whose matrices cannot be put together; names it.
    """
    _number(group, "lr", "a number >= 0 or a tensor with one element", low=0.0)
    _number(group, "weight_decay", "a number >= 0", low=0.0)
    _flags(group, "use_muon", "maximize")
    if group["use_muon"]:
        _check_muon_options(group)
        for index, param in enumerate(group["params"]):
            _check_param(group, param, index)
    else:
        _check_adamw_options(group)


def _check_muon_options(group: dict[str, Any]) -> None:
    _number(group, "momentum", "a number in [0, 1)", low=0.0, below=1.0)
    _flags(group, "nesterov", "cautious_weight_decay", "transposed")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < MAX_NS_STEPS:
        raise _refused("ns_steps", steps, f"a whole number from 1 to {MAX_NS_STEPS - 1}")
    _number(group, "ns_eps", "a number > 0", above=0.0)
    if isinstance(group["ns_dtype"], torch.dtype):
        group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")
    _choice(group, "ns_dtype", NS_DTYPES)
    _choice(group, "momentum_mode", MOMENTUM_MODES)
    _choice(group, "adjust_lr_fn", ADJUST_LR_FNS)
    _check_coefficients(group)
    group["split"] = as_rule(group["split"])


def _check_adamw_options(group: dict[str, Any]) -> None:
    betas = group["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(isinstance(b, (int, float, Tensor)) and 0 <= b < 1 for b in betas)):
        raise _refused("betas", betas, "two numbers in [0, 1)")
    _number(group, "eps", "a number >= 0", low=0.0)
    if group.get("amsgrad"):  # of a checkpoint
        raise _refused("amsgrad", True, "torch.optim.AdamW for it: Muon's AdamW groups have none")
    if group["foreach"] and group["fused"]:
        raise ConfigError("foreach=True and fused=True exclude each other; set one of them")


def _check_coefficients(group: dict[str, Any]) -> None:
    given = group["ns_coefficients"]
    if isinstance(given, str):
        _choice(group, "ns_coefficients", tuple(COEFFICIENTS), "or (a, b, c), or several of them")
        return
    try:
        table = as_table(given)
    except (TypeError, ValueError, IndexError, KeyError):
        allowed = f"one of {tuple(COEFFICIENTS)}, or (a, b, c), or several of them"
        raise _refused("ns_coefficients", given, allowed) from None
    group["ns_coefficients"] = table


def _check_param(group: dict[str, Any], param: Tensor, index: int) -> None:
    names = group.get("param_names")
    name = repr(names[index]) if names else f"parameter {index} of the group"
    if not param.is_floating_point():
        raise ConfigError(f"{name} has dtype {param.dtype}; Muon needs a real floating dtype")
    try:
        block_shapes(param.shape, group["split"], group["transposed"])
    except ConfigError as error:
        advice = "give the group another split, or use_muon=False (muon_groups sorts a whole model)"
        raise ConfigError(f"{name}: {error}; {advice}") from None
    check_sum(name, param)
    if is_scattered(group, param):
        parts_of(name, param)


def _number(
    group: dict[str, Any],
    option: str,
    allowed: str,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    value = group[option]
    if isinstance(value, Tensor) and option == "lr":
        if value.numel() != 1:
            raise _refused(option, value, allowed)
        if value.is_meta:
            return
        value = value.item()
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    fits = fits and (low is None or value >= low) and (above is None or value > above)
    if not (fits and (below is None or value < below)):
        raise _refused(option, value, allowed)


def _flags(group: dict[str, Any], *options: str) -> None:
    for option in options:
        if not isinstance(group[option], bool):
            raise _refused(option, group[option], "True or False")


def _choice(
    group: dict[str, Any], option: str, allowed: tuple[str | None, ...], more: str = ""
) -> None:
    if group[option] not in allowed:
        raise _refused(option, group[option], f"one of {allowed} {more}".rstrip())


def _refused(option: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{option}={value!r} is not allowed; use {allowed}")
