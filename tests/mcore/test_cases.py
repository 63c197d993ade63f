"""Every case on ranks: number of ranks, how they are laid out (see worker.py), case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Outcome = Callable[[int, str, str], str]
PLAIN = [
    (1, "tp1", "plain.adam"),
    (1, "tp1", "plain.muon"),
    (2, "tp1", "plain.adam"),
    (2, "tp1", "plain.muon"),
    (2, "tp1", "plain.muon_dealt"),
    (2, "tp2", "plain.dist_muon"),
]
PARITY = [
    (1, "tp1", "parity.float16_adam"),
    (1, "tp1", "parity.float16_muon"),
    (1, "tp1", "parity.float32_adam"),
    (1, "tp1", "parity.float32_muon"),
    (1, "tp1", "parity.dist_muon"),
    (1, "tp1", "parity.muon"),
    (1, "tp1", "parity.muon_lion"),
    (1, "tp1", "parity.muon_clipped"),
    (1, "tp1", "parity.adam"),
    (1, "tp1", "parity.adam_fused"),
    (1, "tp1", "parity.adam_float16"),
    (1, "tp1", "parity.adam_clipped"),
    (1, "tp1", "parity.adam_float16_gradients"),
    (1, "tp1", "parity.adam_bfloat16_gradients_clipped"),
    (1, "tp1", "parity.adam_zeros_counted"),
    (1, "tp1", "parity.adam_experts"),
    (1, "tp1", "parity.muon_experts"),
    (2, "tp1", "parity.adam"),
    (2, "tp1", "parity.muon"),
    (2, "tp1", "parity.muon_dealt"),
    (2, "tp1", "parity.muon_fused"),
    (2, "tp1", "parity.adam_overlapped"),
    (2, "tp1", "parity.muon_overlapped"),
    (2, "tp1", "parity.adam_bfloat16_gradients"),
    (2, "tp1", "parity.muon_bfloat16_gradients"),
    (2, "tp2", "parity.dist_muon"),
    (2, "tp2", "parity.muon_duplicated"),
    (2, "tp2", "parity.muon_distributed"),
    (2, "ep2", "parity.adam_experts"),
    (2, "ep2", "parity.muon_experts"),
    (2, "pp2", "parity.adam_tied"),
    (2, "pp2", "parity.muon_tied"),
    (2, "pp2vp2", "parity.adam_four_layers"),
    (2, "pp2vp2", "parity.muon_dealt_four_layers"),
    (2, "cp2", "parity.adam"),
    (2, "cp2", "parity.muon_dealt"),
    (4, "tp1", "parity.dist_muon"),
    (4, "tp1", "parity.adam"),
    (4, "tp2", "parity.muon"),
    (4, "tp2", "parity.adam"),
    (4, "ep2", "parity.muon_dealt_experts"),
]
BEHAVIOUR = [
    (1, "tp1", "parity.skipped_step"),
    (1, "tp1", "parity.too_large_norm"),
    (1, "tp1", "parity.scheduled"),
    (1, "tp1", "parity.reloaded"),
    (1, "tp1", "parity.set_up_late"),
    (1, "tp1", "parity.half_resident"),
    (2, "tp1", "parity.skipped_step"),
    (2, "tp1", "parity.reloaded"),
]
CHECKPOINTS = [
    (1, "tp1", "checkpoints.float16_muon"),
    (1, "tp1", "checkpoints.float16_adam"),
    (1, "tp1", "checkpoints.torch_format"),
    (1, "tp1", "checkpoints.adam_of_torch_by_rank"),
    (2, "tp1", "checkpoints.muon_dealt"),
    (2, "tp1", "checkpoints.muon_fused"),
    (2, "tp1", "checkpoints.muon_fused_by_rank"),
    (2, "tp1", "checkpoints.adam_fused"),
    (2, "tp1", "checkpoints.adam_fused_by_rank"),
    (2, "tp1", "checkpoints.adam_of_torch"),
    (2, "tp1", "checkpoints.adam_of_torch_by_rank"),
    (2, "tp1", "checkpoints.muon_of_torch"),
    (2, "tp1", "checkpoints.own"),
    (2, "tp2", "checkpoints.muon_dealt"),
    (2, "ep2", "checkpoints.muon_dealt_experts"),
    (2, "pp2", "checkpoints.adam_fused"),
    (2, "cp2", "checkpoints.adam_fused_by_rank"),
    (1, "tp1", "checkpoints.asynchronous"),
    (2, "tp1", "checkpoints.one_after_the_other"),
    (2, "tp1", "checkpoints.save_to_reshard"),
    (2, "tp2", "checkpoints.save_to_reshard"),
    (4, "tp1", "checkpoints.load_resharded"),
]
LAUNCHED = [(1, "tp1", "launch.adam"), (1, "tp1", "launch.muon")]
CODECS = [
    (1, "tp1", "codecs.split_dist_muon"),
    (1, "tp1", "codecs.split_adam"),
    (1, "tp1", "codecs.split_of_nothing"),
    (1, "tp1", "codecs.dist_muon_bf16"),
    (1, "tp1", "codecs.around_a_step"),
    (2, "tp1", "codecs.split_dist_muon"),
    (2, "tp1", "codecs.split_muon"),
    (2, "tp1", "codecs.split_adam"),
    (2, "tp1", "codecs.split_checkpoints"),
    (2, "tp1", "codecs.split_checkpoints_by_rank"),
    (2, "tp1", "codecs.adam_bf16"),
    (2, "tp1", "codecs.adam_int8"),
    (2, "tp1", "codecs.muon_int8"),
    (2, "tp1", "codecs.taken_from_float32"),
]
BOUNDS = [
    (1, "tp1", "bounds.anonymous_memory"),
    (1, "tp1", "bounds.nothing_in_memory"),
    (1, "tp1", "bounds.no_float32_gradients"),
    (1, "tp1", "bounds.saves_from_files"),
    (2, "tp1", "bounds.roles"),
    (4, "tp1", "bounds.every_rank_streams"),
    (4, "tp1", "bounds.a_rank_that_does_not_is_found"),
]


@pytest.mark.parametrize(("world", "layout", "case"), PLAIN)
def test_megatron_itself_trains_on_a_cpu(
    outcome: Outcome, world: int, layout: str, case: str
) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), PARITY)
def test_streaming_gives_the_bits_of_megatron_itself(
    outcome: Outcome, world: int, layout: str, case: str
) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), BEHAVIOUR)
def test_what_megatron_does_around_a_step_goes_on_working(
    outcome: Outcome, world: int, layout: str, case: str
) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), CHECKPOINTS)
def test_checkpoints_are_those_of_megatron(
    outcome: Outcome, world: int, layout: str, case: str
) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), LAUNCHED)
def test_three_lines_are_enough(outcome: Outcome, world: int, layout: str, case: str) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), CODECS)
def test_state_in_fewer_bytes(outcome: Outcome, world: int, layout: str, case: str) -> None:
    assert outcome(world, layout, case) == ""


@pytest.mark.parametrize(("world", "layout", "case"), BOUNDS)
def test_memory_drive_and_reports(outcome: Outcome, world: int, layout: str, case: str) -> None:
    assert outcome(world, layout, case) == ""
