"""`optstream train` from the flags to the table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

SHORT = ("--model", "tiny", "--steps", 4, "--batch-size", 2, "--seq-len", 16)


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def losses(command, text, tmp_path):
    """Run a short training and return every loss it measured, all bits."""

    def run(*argv: object) -> list[float]:
        path = tmp_path / "losses.jsonl"
        path.unlink(missing_ok=True)
        outcome = command("train", "--text", text, *SHORT, "--metrics", path, *argv)
        assert outcome.code == 0, outcome.err
        lines = read_metrics(path)
        return [line.get("loss", line.get("held_out_loss")) for line in lines]

    return run


def test_the_table_says_what_was_done(command, place, text):
    outcome = command("train", "--text", text, *SHORT, "--store", "none")
    assert outcome.code == 0
    for part in ("tiny", "4 of 4, 128 tokens", "before", "after", "the plain optimizer", "ms"):
        assert part in outcome.out
    assert "nothing: the state is in memory" in outcome.out
    assert list(place.iterdir()) == []


def test_progress_is_short_lines_where_there_is_no_terminal(command, text):
    outcome = command("train", "--text", text, *SHORT, "--steps", 40, "--store", "none")
    lines = [line for line in outcome.err.splitlines() if line.startswith("step ")]
    assert 10 <= len(lines) <= 12
    assert lines[0].startswith("step 1/40: loss ")
    assert lines[-1].startswith("step 40/40: loss ")
    assert "tokens/s" in lines[-1]
    assert "anonymous memory" in lines[-1]


def test_quiet_is_the_table_alone(command, text):
    outcome = command("train", "--text", text, *SHORT, "--store", "none", "--quiet")
    assert outcome.err == ""
    assert "held-out loss" in outcome.out


def test_the_loss_falls(losses):
    measured = losses("--store", "none", "--steps", 40, "--batch-size", 4)
    assert measured[-1] < measured[0] - 1.0


def test_metrics_have_a_line_a_step_and_are_appended(command, text, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"old": 1}\n')
    argv = ("train", "--text", text, *SHORT, "--store", "none", "--metrics", path)
    assert command(*argv).code == 0
    old, before, *steps, after = read_metrics(path)
    assert old == {"old": 1}
    assert [line["step"] for line in (before, *steps, after)] == [0, 1, 2, 3, 4, 4]
    everywhere = {"optimizer", "step", "held_out_loss"}
    assert set(after) == everywhere | {"weights_xxh3"}
    of_rank = {"rank", "num_windows", "state_bytes", "peak_host_bytes"}
    assert set(before) == everywhere | of_rank
    assert before["rank"] == before["num_windows"] == 0  # with the plain optimizer
    for line in steps:
        assert line["num_tokens"] == 32
        assert line["total_s"] >= line["optimizer_s"] > 0
        assert line["anon_bytes"] > 10 * 2**20
        assert line["read_bytes"] == line["written_bytes"] == 0


def test_a_seed_fixes_every_loss(losses):
    first = losses("--store", "none", "--seed", 5)
    torch.rand(3)
    assert losses("--store", "none", "--seed", 5) == first
    assert losses("--store", "none", "--seed", 6) != first


def test_flags_reach_the_run(losses):
    default = losses("--store", "none")
    for flag, value in (("--lr", 0.1), ("--weight-decay", 5), ("--dtype", "bfloat16")):
        assert losses("--store", "none", flag, value)[1:] != default[1:], flag


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two layers with a tokenizer of letters, as save_pretrained writes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(128)}
    letters[" "], letters["<unk>"] = 32, 128
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=129, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def test_a_model_directory_is_trained_with_its_own_tokenizer(losses, model_directory):
    measured = losses("--store", "none", "--model", model_directory, "--lr", 0.01, "--steps", 20)
    assert measured[-1] < measured[0]
    again = losses("--store", "none", "--model", model_directory, "--lr", 0.01, "--steps", 20)
    assert again == measured  # with dropout


def test_a_sequence_longer_than_the_model_takes_is_refused(command, text, model_directory):
    argv = ("train", "--text", text, "--model", model_directory, "--seq-len", 33, "--quiet")
    outcome = command(*argv, "--store", "none")
    assert outcome.code == 1
    assert "takes 32 tokens" in outcome.err


def test_a_model_directory_that_lacks_weights_is_refused(command, text, model_directory, tmp_path):
    from safetensors.torch import load_file, save_file

    partial = shutil.copytree(model_directory, tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    outcome = command("train", "--text", text, *SHORT, "--model", partial, "--store", "none")
    assert outcome.code == 1
    assert "lacks 1 weights of its model, transformer.h.1.mlp.c_fc.weight" in outcome.err


def test_a_tokenizer_larger_than_the_embedding_is_refused(command, text, model_directory, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    wrong = shutil.copytree(model_directory, tmp_path / "wrong")
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(wrong)
    outcome = command("train", "--text", text, *SHORT, "--model", wrong, "--store", "none")
    assert outcome.code == 1
    assert "has 129 entries, the model's embedding only 100" in outcome.err


def test_a_model_directory_without_tokenizer_is_refused(command, text, model_directory, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model_directory / name).read_bytes())
    argv = ("train", "--text", text, *SHORT, "--model", bare, "--quiet", "--store", "none")
    outcome = command(*argv)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "no tokenizer" in outcome.err


def test_compare_trains_with_adamw_on_equal_weights_and_batches(command, text, place, tmp_path):
    path = tmp_path / "m.jsonl"
    argv = ("train", "--text", text, *SHORT, "--compare", "--metrics", path, "--save-dir", "s")
    outcome = command(*argv, "--adamw-lr", 0.003)
    assert outcome.code == 0, outcome.err
    rows = {
        line.split("│")[1].strip(): line.split("│")
        for line in outcome.out.splitlines()
        if "│" in line
    }
    assert "muon, lr 0.02" in rows["optimizer"][2]
    assert "adamw, lr 0.003" in rows["optimizer"][3]
    for name, part in (("held-out loss", "after"), ("time a step", "ms"), ("moved a step", "MiB")):
        assert all(part in cell for cell in rows[name][2:4]), name
    lines = read_metrics(path)
    runs = [[x for x in lines if x["optimizer"] == name] for name in ("muon", "adamw")]
    assert [x["step"] for x in runs[0]] == [x["step"] for x in runs[1]] == [0, 1, 2, 3, 4, 4]
    muon, adamw = ([x.get("loss") for x in run] for run in runs)
    assert muon[1] == adamw[1]  # before the first update
    assert muon[2] != adamw[2]
    assert [child.name for child in (place / "s").iterdir()] == ["step000004"]


def test_muon_beats_adamw_on_a_text_with_the_defaults(losses):
    argv = ("--store", "none", "--steps", 40, "--batch-size", 4)
    assert losses(*argv)[-1] < losses(*argv, "--optimizer", "adamw")[-1]
