"""What each family of optimizers needs to be streamed; a flag that would do nothing is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optstream.codecs import SPLIT
from optstream.errors import ConfigError
from optstream.integrations.megatron.arguments import (
    DEFAULTS,
    FP32,
    MOMENT_DTYPES,
    given_directory,
)

_FLAG = "--stream-optimizer-state-to-disk"


@dataclass(frozen=True)
class Requirement:
    """One thing that must hold.

    Attributes:
        holds: of the arguments.
        wrong: what is the matter, why, and which flag to set.
    """

    holds: Callable[[Any], bool]
    wrong: str


def _off(name: str) -> Callable[[Any], bool]:
    return lambda args: not getattr(args, name, False)


def _sharded(name: str) -> Callable[[Any], bool]:
    """Return whether ranks share the state; with one of them there is nothing to share."""
    return lambda args: bool(getattr(args, name, False)) or _num_replicas(args) == 1


def _num_replicas(args: Any) -> int:
    """Return how many ranks have the same parameters: context-parallel ones do, too."""
    return int(getattr(args, "data_parallel_size", 1) * getattr(args, "context_parallel_size", 1))


def _moment_dtype(args: Any) -> str:
    return str(getattr(args, "stream_optimizer_state_moment_dtype", FP32))


_ALL = (
    Requirement(
        _off("optimizer_cpu_offload"),
        "--optimizer-cpu-offload keeps the same state in host memory; drop one of the two",
    ),
    Requirement(
        _off("use_precision_aware_optimizer"),
        "--use-precision-aware-optimizer hides the masters inside the fused Adam, where they "
        "cannot be moved; drop it (--stream-optimizer-state-moment-dtype says how moments are "
        "stored)",
    ),
    Requirement(
        _off("use_megatron_fsdp"),
        "--use-megatron-fsdp shards masters as DTensors, which are not streamed; use "
        "--use-distributed-optimizer",
    ),
    Requirement(
        _off("use_torch_fsdp2"),
        "--use-torch-fsdp2 shards parameters as DTensors, which are not streamed; use "
        "--use-distributed-optimizer",
    ),
    Requirement(
        _off("fp8_param_gather"),
        "--fp8-param-gather quantizes parameters from all masters at once, which are not in memory "
        "together; drop it",
    ),
    Requirement(
        _off("fp4_param_gather"),
        "--fp4-param-gather quantizes parameters from all masters at once, which are not in memory "
        "together; drop it",
    ),
    Requirement(
        _off("optimizer_cuda_graph"),
        "--optimizer-cuda-graph records the step once, and a recorded step reads no files; drop it",
    ),
    Requirement(
        _off("qk_clip"),
        "--qk-clip scales masters between two steps, when they are on the drive; drop it",
    ),
    Requirement(
        _off("log_params_norm"),
        "--log-params-norm reads all masters between two steps, when they are on the drive; "
        "drop it",
    ),
    Requirement(
        lambda args: 0 < getattr(args, "optimizer_state_offload_fraction", 1.0) <= 1,
        "--optimizer-state-offload-fraction is the part of the state that is streamed, above 0 and "
        f"at most 1; to keep all of it in memory drop {_FLAG}",
    ),
    Requirement(
        lambda args: _moment_dtype(args) in MOMENT_DTYPES,
        f"--stream-optimizer-state-moment-dtype is one of {', '.join(MOMENT_DTYPES)}",
    ),
    Requirement(
        lambda args: _moment_dtype(args) != SPLIT or getattr(args, "bf16", False),
        "--stream-optimizer-state-moment-dtype split stores masters of bfloat16 parameters in "
        "fewer bytes, and there are none without --bf16; set that, or leave it at fp32",
    ),
    Requirement(
        lambda args: getattr(args, "offload_train_disk_chunk_mb", 256) >= 1,
        "--offload-train-disk-chunk-mb is the size of a window and never means everything at once; "
        "give at least 1 (256 is the default)",
    ),
)

_NO_SCALED_GRADIENTS = Requirement(
    _off("fp16"), "Muon cannot be trained with --fp16, whose gradients are scaled; use --bf16"
)
_MASTERS = Requirement(
    lambda args: getattr(args, "bf16", False),
    "Megatron's layer-wise optimizer cannot be trained without --bf16; set it",
)
_KNOWN_MOMENTS = Requirement(
    lambda args: _moment_dtype(args) in (FP32, SPLIT),
    "nothing is known of its second moments that would allow to store them in fewer bytes; give "
    "--stream-optimizer-state-moment-dtype split or fp32",
)
_MUON = (
    Requirement(
        _sharded("use_layer_wise_distributed_optimizer"),
        "without --use-distributed-optimizer every data-parallel rank would write the whole "
        "state to its drive; set it, or use --optimizer dist_muon",
    ),
    _NO_SCALED_GRADIENTS,
)
_DIST_MUON = (_NO_SCALED_GRADIENTS, _MASTERS)

_FAMILIES: Mapping[str, Sequence[Requirement]] = {
    "adam": (
        Requirement(
            _sharded("use_distributed_optimizer"),
            "without --use-distributed-optimizer every data-parallel rank would write the whole "
            "state to its drive; set it",
        ),
    ),
    "muon": _MUON,
    "dist_muon": _DIST_MUON,
    "adaptive_muon": (*_MUON, _KNOWN_MOMENTS),
    "dist_adaptive_muon": (*_DIST_MUON, _KNOWN_MOMENTS),
}
"""By `--optimizer`."""


def validate(args: Any) -> None:
    """Refuse arguments with which the state cannot be on the drive; call it after Megatron's own.

    Raises:
        ConfigError: what is wrong, why, and which flag to set.
    """
    if not getattr(args, "stream_optimizer_state_to_disk", False):
        _check_not_inert(args)
        return
    if args.optimizer not in _FAMILIES:
        raise ConfigError(
            f"{_FLAG} streams --optimizer {', '.join(_FAMILIES)}, not {args.optimizer}; choose "
            "one, or drop the flag"
        )
    for requirement in (*_ALL, *_FAMILIES[args.optimizer]):
        if not requirement.holds(args):
            raise ConfigError(f"{_FLAG} with --optimizer {args.optimizer}: {requirement.wrong}")
    given_directory(args)


def _check_not_inert(args: Any) -> None:
    for name, default in DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        if getattr(args, name, default) != default:
            raise ConfigError(
                f"{flag} does nothing without {_FLAG}; set that as well, or drop {flag}"
            )
