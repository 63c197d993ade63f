"""An option that cannot be used is an error at construction that names it and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optstream.errors import ConfigError, OffloadError
from optstream.muon import Muon


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 6))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("lr", -0.1, ">= 0"),
        ("lr", float("nan"), ">= 0"),
        ("lr", float("inf"), ">= 0"),
        ("lr", torch.ones(2), "one element"),
        ("lr", "fast", "number"),
        ("lr", torch.tensor(-1.0), ">= 0"),
        ("lr", torch.tensor(float("nan")), ">= 0"),
        ("momentum", 1.0, r"\[0, 1\)"),
        ("momentum", -0.1, r"\[0, 1\)"),
        ("nesterov", 1, "True or False"),
        ("weight_decay", -1.0, ">= 0"),
        ("ns_steps", 0, "from 1 to 99"),
        ("ns_steps", 100, "from 1 to 99"),
        ("ns_steps", 5.0, "from 1 to 99"),
        ("ns_steps", True, "from 1 to 99"),
        ("ns_coefficients", "cubic", "quintic_schedule"),
        ("ns_coefficients", (1, 2), "quintic_schedule"),
        ("ns_coefficients", (), "quintic_schedule"),
        ("ns_coefficients", 3.0, "quintic_schedule"),
        ("ns_coefficients", (float("nan"), 1, 1), "quintic_schedule"),
        ("ns_coefficients", (float("inf"), 1, 1), "quintic_schedule"),
        ("ns_dtype", "int8", "bfloat16"),
        ("ns_dtype", torch.int32, "bfloat16"),
        ("ns_eps", 0.0, "> 0"),
        ("momentum_mode", "heavy", "classical"),
        ("adjust_lr_fn", "fan_in", "match_rms_adamw"),
        ("cautious_weight_decay", "yes", "True or False"),
        ("split", ("thirds", 3), "equal"),
        ("split", ("stack", 5), "equal"),
        ("split", ("stack", ()), "equal"),
        ("transposed", None, "True or False"),
        ("maximize", None, "True or False"),
        ("use_muon", "both", "True or False"),
    ],
)
def test_refused(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as error:
        Muon([matrix()], **{option: value})
    assert option in str(error.value)
    assert isinstance(error.value, (OffloadError, ValueError))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("betas", 5),
        ("betas", ("a", "b")),
        ("eps", -1.0),
        ("lr", -1.0),
    ],
)
def test_refused_in_adamw_groups(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        Muon([{"params": [matrix()], "use_muon": False, option: value}])


def test_foreach_and_fused_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="fused"):
        Muon([{"params": [matrix()], "use_muon": False, "foreach": True, "fused": True}])


def test_shapes_are_checked_with_the_name() -> None:
    with pytest.raises(ConfigError, match=r"'h\.0\.norm'.*\(6,\).*use_muon=False"):
        Muon([("h.0.attn", matrix()), ("h.0.norm", nn.Parameter(torch.ones(6)))])
    with pytest.raises(ConfigError, match=r"parameter 1 .*\('equal', 5\).*\(4, 6\)"):
        Muon([nn.Parameter(torch.ones(5, 6)), matrix()], split=("equal", 5))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="complex64"):
        Muon([nn.Parameter(torch.ones(4, 6, dtype=torch.complex64))])


def test_add_param_group_checks_too_and_adds_nothing_then() -> None:
    optimizer = Muon([matrix()])
    with pytest.raises(ConfigError, match="ns_steps"):
        optimizer.add_param_group({"params": [matrix()], "ns_steps": -1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [matrix()], "split": ["rows", [1, 3]]})
    assert optimizer.param_groups[1]["split"] == ("rows", (1, 3))


def test_a_loaded_checkpoint_is_checked() -> None:
    optimizer = Muon([matrix()])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["split"] = ("equal", 3)
    with pytest.raises(ConfigError, match=r"\('equal', 3\).*\(4, 6\)"):
        optimizer.load_state_dict(saved)


def test_group_options_are_plain_values() -> None:
    optimizer = Muon([matrix()], ns_dtype=torch.bfloat16, ns_coefficients=[[1, 2, 3]])
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert group["ns_dtype"] == "bfloat16"
    assert group["ns_coefficients"] == ((1.0, 2.0, 3.0),)

    def plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(plain(item) for item in value)
        return value is None or type(value) in (str, int, float, bool)

    assert all(plain(value) for value in group.values())
