"""Our flags beside Megatron's own, and what `validate` asks for by Megatron's names."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training import training
from megatron.training.arguments import add_megatron_arguments

from optstream.integrations.megatron import add_arguments, validate

SET_BY_VALIDATION = {"data_parallel_size", "use_layer_wise_distributed_optimizer"}
"""Megatron's `validate_args` adds these."""


class Recorder:
    """Arguments that remember what was asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._args, name)


def test_every_name_that_is_asked_for_is_megatrons() -> None:
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    for optimizer in ("adam", "muon", "dist_muon"):
        flags = ["--stream-optimizer-state-to-disk", "--offload-train-disk-dir", "/nvme"]
        args = parser.parse_args([*flags, "--optimizer", optimizer, "--bf16"])
        recorder = Recorder(args)
        validate(recorder)
        unknown = recorder.asked - vars(args).keys() - SET_BY_VALIDATION
        assert not unknown, f"{optimizer}: Megatron has no {unknown}"


def test_what_pretrain_makes_can_be_streamed_before_a_checkpoint_is_loaded() -> None:
    """docs/megatron.md replaces this name in Megatron's module."""
    names = training.setup_model_and_optimizer.__code__.co_names
    assert names.index("get_megatron_optimizer") < names.index("load_checkpoint")
    assert callable(training.get_megatron_optimizer)
