"""Megatron's flags: what is asked for happens, or an error says what is wrong, why, what to set.

Needs no Megatron; training with it is in tests/mcore.
"""

from __future__ import annotations

import argparse
import getpass
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optstream.errors import ConfigError
from optstream.integrations.megatron import add_arguments, setup, validate
from optstream.integrations.megatron.arguments import (
    resident_share,
    state_directory,
    storage,
    window_bytes,
)

ON = "--stream-optimizer-state-to-disk"
DTYPE = "--stream-optimizer-state-moment-dtype"


def parsed(*flags: str, **megatron: Any) -> argparse.Namespace:
    """Return arguments as Megatron leaves them after its own validation."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(list(flags))
    given = {
        "optimizer": "adam",
        "use_distributed_optimizer": True,
        "use_layer_wise_distributed_optimizer": False,
        "data_parallel_size": 8,
        "bf16": True,
        **megatron,
    }
    for name, value in given.items():
        setattr(args, name, value)
    return args


def test_without_the_flag_nothing_happens() -> None:
    assert setup(parsed(), object()) is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--offload-train-disk-dir", "/mnt/nvme0"),
        ("--offload-train-disk-chunk-mb", "0"),
        ("--optimizer-state-offload-fraction", "0.5"),
        ("--stream-optimizer-state-moment-dtype", "int8"),
        ("--stream-optimizer-state-metrics-dir", "/tmp"),
    ],
)
def test_a_flag_that_does_nothing_by_itself_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} does nothing without {ON}"):
        validate(parsed(flag, value))


@pytest.mark.parametrize(
    ("optimizer", "megatron"),
    [
        ("adam", {}),
        ("adam", {"use_distributed_optimizer": False, "data_parallel_size": 1}),
        ("adam", {"bf16": False}),
        ("muon", {"use_layer_wise_distributed_optimizer": True}),
        ("adaptive_muon", {"use_layer_wise_distributed_optimizer": True}),
        ("dist_muon", {"use_distributed_optimizer": False}),
    ],
)
def test_each_family_passes_with_what_it_needs(optimizer: str, megatron: dict[str, Any]) -> None:
    validate(parsed(ON, "--offload-train-disk-dir", "/nvme", optimizer=optimizer, **megatron))


@pytest.mark.parametrize(
    ("flags", "megatron", "text"),
    [
        ((), {"optimizer": "sgd"}, "streams --optimizer adam, muon, dist_muon"),
        ((), {"use_distributed_optimizer": False}, "without --use-distributed-optimizer every"),
        (
            (),
            {
                "use_distributed_optimizer": False,
                "data_parallel_size": 1,
                "context_parallel_size": 2,
            },
            "without --use-distributed-optimizer every",
        ),
        ((), {"optimizer": "muon"}, "or use --optimizer dist_muon"),
        ((), {"optimizer": "dist_muon", "fp16": True}, "Muon cannot be trained with --fp16"),
        ((), {"optimizer": "dist_muon", "bf16": False}, "cannot be trained without --bf16"),
        ((), {"optimizer_cpu_offload": True}, "drop one of the two"),
        ((), {"use_precision_aware_optimizer": True}, "moment-dtype says how moments"),
        ((), {"use_megatron_fsdp": True}, "use --use-distributed-optimizer"),
        ((), {"use_torch_fsdp2": True}, "use --use-distributed-optimizer"),
        ((), {"fp8_param_gather": True}, "--fp8-param-gather quantizes"),
        ((), {"fp4_param_gather": True}, "--fp4-param-gather quantizes"),
        ((), {"optimizer_cuda_graph": True}, "a recorded step reads no files"),
        ((), {"qk_clip": True}, "--qk-clip scales masters"),
        ((), {"log_params_norm": True}, "--log-params-norm reads all masters"),
        (("--offload-train-disk-chunk-mb", "0"), {}, "never means everything at once"),
        (("--optimizer-state-offload-fraction", "0"), {}, "above 0 and at most 1"),
        (("--optimizer-state-offload-fraction", "1.5"), {}, "above 0 and at most 1"),
        ((DTYPE, "fp8"), {}, "is one of fp32, split, bf16, int8"),
        ((DTYPE, "bf16-stochastic"), {}, "is one of fp32, split, bf16, int8"),
        ((DTYPE, "split"), {"fp16": True, "bf16": False}, "there are none without --bf16"),
        ((DTYPE, "int8"), {"optimizer": "dist_adaptive_muon"}, "nothing is known of its second"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    flags: tuple[str, ...], megatron: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        validate(parsed(ON, "--offload-train-disk-dir", "/nvme", *flags, **megatron))
    assert ON in str(refused.value)


def test_the_directory_is_the_users_own_under_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    expected = Path("/scratch") / getpass.getuser() / "optstream" / "critic" / "rank00003"
    assert state_directory(parsed(ON), "critic", 3) == expected


def test_a_role_leads_nowhere_else() -> None:
    with pytest.raises(ConfigError, match=r"role='\.\./actor': give letters"):
        state_directory(parsed(ON, "--offload-train-disk-dir", "/nvme"), "../actor", 0)


def test_without_scratch_a_directory_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    with pytest.raises(ConfigError, match=r"\$SCRATCH is not set and no --offload-train-disk-dir"):
        validate(parsed(ON))
    args = parsed(ON, "--offload-train-disk-dir", "/nvme")
    assert state_directory(args, "", 0) == Path("/nvme/rank00000")


def test_sizes_are_what_the_flags_say() -> None:
    args = parsed(
        *(ON, "--offload-train-disk-chunk-mb", "64", "--optimizer-state-offload-fraction", "0.75")
    )
    assert window_bytes(args) == 64 * 2**20
    assert resident_share(args) == "25.000000%"


@pytest.mark.parametrize("optimizer", ["adam", "dist_muon"])
@pytest.mark.parametrize(
    ("dtype", "codec"), [("fp32", "exact"), ("split", "split"), ("bf16", "bf16"), ("int8", "int8")]
)
def test_moments_are_stored_as_asked_for(optimizer: str, dtype: str, codec: str) -> None:
    args = parsed(ON, "--offload-train-disk-dir", "/nvme", DTYPE, dtype, optimizer=optimizer)
    validate(args)
    assert storage(args).codec == codec


def test_the_help_tells_what_is_stored_and_how_to_see_it() -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for part in (
        *("adam 12", "dist_muon 8 for matrices", "`df` and not in `du`", "optstream ls"),
        *("{fp32,split,bf16,int8}", "matrices of muon and dist_muon 6", "int8: adam 4.1, muon 3.1"),
    ):
        assert part in text


def test_importing_it_takes_neither_megatron_nor_the_library_it() -> None:
    code = (
        "import sys, optstream; assert not any('integrations' in name for name in sys.modules);"
        "import optstream.integrations.megatron; assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
