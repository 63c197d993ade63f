"""`--codec`: split changes no bit, the others little; what was saved is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optstream.codecs import NAMES
from optstream.training.config import CODECS

SHORT = ("--model", "tiny", "--batch-size", 2, "--seq-len", 16, "--window", "256KiB")
BF16 = ("--dtype", "bfloat16")


@pytest.fixture
def losses(command, text, tmp_path):
    def run(*argv: Any) -> list[tuple[int | None, float]]:
        path = tmp_path / "losses.jsonl"
        path.unlink(missing_ok=True)
        outcome = command("train", "--text", text, *SHORT, "--metrics", path, *argv)
        assert outcome.code == 0, outcome.err
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(line.get("step"), line.get("loss", line.get("held_out_loss"))) for line in lines]

    return run


def test_the_names_are_those_of_the_library():
    assert CODECS == NAMES


def test_split_ends_with_the_same_losses(losses, place: Path):
    expected = losses("--steps", 4, *BF16)
    assert losses("--steps", 4, *BF16, "--codec", "split") == expected


@pytest.mark.parametrize("codec", ["bf16", "bf16-stochastic", "int8"])
def test_the_others_end_near(losses, place: Path, codec: str):
    expected = losses("--steps", 4)
    found = losses("--steps", 4, "--codec", codec)
    assert found != expected
    assert found[-1][1] == pytest.approx(expected[-1][1], abs=0.05)


@pytest.mark.parametrize("codec", ["split", "bf16-stochastic", "int8"])
def test_a_resumed_run_keeps_its_codec_and_its_losses(losses, place: Path, codec: str):
    argv = (*BF16, "--codec", codec, "--save-dir", "s", "--save-every", 2)
    whole = losses("--steps", 4, *argv)
    rest = losses("--resume", "s/step000002")
    assert [line for line in rest if line in whole] == rest
    assert losses("--resume", "s/step000002", "--window", "1MiB") == rest


def test_another_codec_goes_on_from_a_checkpoint(losses, place: Path, capfd):
    whole = losses("--steps", 4, *BF16, "--codec", "split", "--save-dir", "s", "--save-every", 2)
    exact = losses("--resume", "s/step000002", "--codec", "exact")
    assert [line for line in exact if line in whole] == exact


def test_refused(command, text, place: Path):
    outcome = command("train", "--text", text, *SHORT, "--codec", "split")
    assert outcome.code == 1
    assert "masters of bfloat16" in outcome.err
    outcome = command("train", "--text", text, "--store", "none", "--codec", "int8")
    assert outcome.code == 2
    assert "--codec does nothing with --store none" in outcome.err


def test_inspect_shows_codecs(losses, command, place: Path):
    losses("--steps", 2, *BF16, "--codec", "int8", "--save-dir", "s")
    out = command("inspect", "s/step000002").out
    for codec in ("split", "int8-signed", "int8-positive"):
        assert codec in out
    facts = json.loads(command("inspect", "s/step000002", "--json").out)
    assert facts["format_version"] == 2
    assert command("verify", "s/step000002").code == 0
