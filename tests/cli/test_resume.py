"""A run that goes on from a checkpoint: the same bits, or a refusal that names both sides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cli.conftest import sentences
from cli.saved import FAST, from_step, train

KINDS = [("muon", "float32"), ("muon", "bfloat16"), ("adamw", "float32"), ("adamw", "bfloat16")]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize(("optimizer", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("before", "after"), [("direct", "direct"), ("direct", "none"), ("none", "direct")]
)
def test_the_rest_of_a_run_is_the_same_bit_for_bit(
    place, text, metrics, optimizer, dtype, before, after
):
    kind = ("--text", text, "--optimizer", optimizer, "--dtype", dtype)
    whole = train(metrics, *kind, "--store", before, "--save-dir", "s", "--save-every", 2)
    rest = train(metrics, "--store", after, "--resume", "s/step000002")
    assert rest == from_step(whole, 2)
    assert set(rest) == {3, 4, "held out"}


def test_another_window_size_goes_on_with_the_same_bits(place, text, metrics):
    whole = train(metrics, "--text", text, "--save-dir", "s", "--save-every", 2)
    rest = train(metrics, "--resume", "s/step000002", "--window", "256KiB")
    assert rest == from_step(whole, 2)


@pytest.mark.parametrize(("before", "after"), [("0", "40%"), ("40%", "0")])
def test_ram_on_one_side_goes_on_with_the_same_bits(place, text, metrics, before, after):
    window = ("--window", "256KiB")
    argv = ("--save-dir", "s", "--save-every", 2, "--ram", before)
    whole = train(metrics, "--text", text, *window, *argv)
    rest = train(metrics, "--resume", "s/step000002", *window, "--ram", after)
    assert rest == from_step(whole, 2)


def test_dropout_goes_on_where_it_was(place, text, metrics, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = make_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=129,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    argv = ("--text", text, "--model", model, "--store", "none", "--lr", "0.02")
    whole = train(metrics, *argv, "--save-dir", "s", "--save-every", 2)
    model = model.rename(tmp_path / "moved")
    rest = train(metrics, "--resume", "s/step000002", "--store", "none", "--model", model)
    assert rest == from_step(whole, 2)


def make_tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(128)} | {"<unk>": 128}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    return path


def test_the_newest_checkpoint_of_a_directory_is_taken_and_saving_goes_on_there(
    place, text, metrics, command
):
    argv = ("--text", text, "--store", "none")
    whole = train(metrics, *argv, "--steps", 6, "--save-dir", "s", "--save-every", 2)
    shutil.rmtree("s/step000006")
    (place / "s" / "step000008").mkdir()  # no checkpoint: nothing in it
    assert train(metrics, "--resume", "s", *argv, "--steps", 6, "--save-dir", "s") == from_step(
        whole, 4
    )
    assert (place / "s" / "step000006" / "trainer.json").is_file()
    outcome = command("train", *FAST, "--steps", 6, "--store", "none", "--resume", "s")
    assert "0 of 6, 0 tokens, after 6 of an earlier run" in outcome.out


def test_more_steps_are_another_schedule_and_fewer_than_done_are_refused(
    place, text, metrics, command
):
    train(metrics, "--text", text, "--store", "none", "--save-dir", "s")
    assert set(train(metrics, "--store", "none", "--resume", "s", "--steps", 5)) == {5, "held out"}
    outcome = command("train", *FAST, "--store", "none", "--resume", "s", "--steps", 3)
    assert outcome.code == 1
    assert "has done 4 steps, --steps 3 is fewer" in outcome.err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, of Muon in float32, and the text it was trained on."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("saved")
    (path / "text.txt").write_text(sentences(1000))
    argv = ("--text", path / "text.txt", "--store", "none", "--save-dir", path / "s")
    train(path / "m.jsonl", *argv)
    return path / "s" / "step000004"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--optimizer", "adamw"), ("--optimizer muon", "--optimizer adamw")),
        (("--dtype", "bfloat16"), ("--dtype float32", "--dtype bfloat16")),
        (("--model", "small"), ("--model tiny", "--model small")),
        (("--lr", "0.5"), ("--lr 0.02", "--lr 0.5")),
        (("--seed", "7"), ("--seed 0", "--seed 7")),
        (("--seq-len", "8"), ("--seq-len 16", "--seq-len 8")),
    ],
    ids=lambda value: value[0],
)
def test_another_run_is_refused_and_both_are_named(command, place, saved, flags, parts):
    outcome = command("train", *FAST, "--resume", saved, "--store", "none", *flags)
    assert_refused(outcome, place, *parts)


def assert_refused(outcome, place: Path, *parts: str) -> None:
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err
    assert list(place.iterdir()) == []


def test_another_text_is_refused(command, place, saved, tmp_path):
    (tmp_path / "other.txt").write_text(sentences(900))
    outcome = command("train", *FAST, "--resume", saved, "--text", tmp_path / "other.txt")
    assert_refused(outcome, place, "trained on", "tokens, xxh3", "--text")


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.safetensors", "its digest"),
        ("trainer.json", "was changed after it was written"),
        ("optimizer/manifest.json", "manifest.json"),
    ],
)
def test_a_changed_file_is_refused(command, place, saved, tmp_path, file, part):
    copy = shutil.copytree(saved, tmp_path / "copy")
    data = bytearray((copy / file).read_bytes())
    data[-20] ^= 1
    (copy / file).write_bytes(data)
    outcome = command("train", *FAST, "--resume", copy, "--store", "none")
    assert_refused(outcome, place, part)


def test_a_path_without_checkpoint_is_refused(command, place, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        outcome = command("train", *FAST, "--resume", path)
        assert_refused(outcome, place, "holds no training checkpoint", "--save-dir")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (99, "version 99, this reads 1; update optstream"),
        (0, "no file of optstream train: version 0"),
        (True, "no file of optstream train: version True"),
        ("1", "no file of optstream train: version '1'"),
    ],
)
def test_another_version_is_refused(command, place, saved, tmp_path, version, text):
    copy = shutil.copytree(saved, tmp_path / "copy")
    document = json.loads((copy / "trainer.json").read_text())
    (copy / "trainer.json").write_text(json.dumps({**document, "version": version}))
    outcome = command("train", *FAST, "--resume", copy)
    assert_refused(outcome, place, text)


def test_the_checkpoint_is_the_owners_alone(saved):
    for path in (saved, *saved.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert [path.name for path in saved.parent.iterdir()] == ["step000004"]
