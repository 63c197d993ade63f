"""Checkpoints of a training: there whole, or not at all; old ones go when the new one is safe."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cli.saved import FAST
from cli.test_signals import end, start_child, wait_for_step
from optstream import durable
from optstream.distributed.ranks import Ranks
from optstream.errors import ConfigError, OutOfSpaceError
from optstream.training.checkpoint import (
    Saves,
    check_save_directory,
    open_saves,
    step_directories,
)

MEMORY = ("--store", "none")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_k_steps_and_at_the_end(command, place, text):
    argv = ("train", *FAST, *MEMORY, "--text", text, "--steps", 5, "--save-every", 2)
    outcome = command(*argv, "--save-dir", "s")
    assert outcome.code == 0
    assert names(place / "s") == ["step000002", "step000004", "step000005"]
    table = " ".join(outcome.out.replace("│", " ").split())
    assert re.search(r"of it saving [\d.]+ ms, [\d.]+%: 3 checkpoints of \d+ ms in s", table)


def test_the_newest_are_kept(command, place, text):
    argv = ("train", *FAST, "--text", text, "--steps", 5, "--save-every", 1)
    outcome = command(*argv, "--save-dir", "s", "--keep", 2)
    assert outcome.code == 0
    assert names(place / "s") == ["step000004", "step000005"]
    assert names(place) == ["s"]


def test_old_ones_stay_until_the_new_one_is_durable(command, place, text, monkeypatch):
    rename = Path.rename

    def fail_at_step_3(self: Path, target: Path) -> Path:
        if self.name == "step000003.tmp":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_at_step_3)
    argv = ("train", *FAST, *MEMORY, "--text", text, "--save-every", 1)
    outcome = command(*argv, "--save-dir", "s", "--keep", 1)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "cannot save" in outcome.err
    assert "step000003: Input/output error" in outcome.err
    assert names(place / "s") == ["step000002"]


@pytest.mark.parametrize("at", ["weights", "trainer", "optimizer"])
def test_a_save_that_fails_on_the_way_leaves_nothing_of_it(command, place, text, monkeypatch, at):
    def fail(*_: object, **__: object) -> None:
        raise OutOfSpaceError(28, "no space left")

    module, name = {
        "weights": ("optstream.training.checkpoint", "save_weights"),
        "trainer": ("optstream.durable", "write_file"),
        "optimizer": ("optstream.StreamedOptimizer", "save"),
    }[at]
    monkeypatch.setattr(f"{module}.{name}", fail)
    outcome = command("train", *FAST, "--text", text, "--save-dir", "s")
    assert (outcome.code, outcome.err) == (1, "optstream: no space left\n")
    assert names(place) == []


def test_what_a_killed_run_left_is_removed_and_never_read(command, place, text):
    for name in ("step000002.tmp", "step000001.old"):
        (place / "s" / name / "optimizer").mkdir(parents=True)
        (place / "s" / name / "trainer.json").touch()
    (place / "s" / "notes.tmp").mkdir()
    assert command("train", *FAST, *MEMORY, "--text", text, "--save-dir", "s").code == 0
    assert names(place / "s") == ["notes.tmp", "step000004"]


def test_a_removed_checkpoint_is_never_seen_in_part(tmp_path, monkeypatch):
    victim = tmp_path / "step000001"
    victim.mkdir()
    (victim / "trainer.json").touch()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    synced = noted_syncs(monkeypatch)
    monkeypatch.setattr(durable.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        durable.remove_directory(victim)
    assert step_directories(tmp_path) == {}
    # or a machine that stops could bring back the name without the files
    assert synced == [(tmp_path, ["step000001.old"])]


def noted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """Return a list that gets each directory that is synced, and what it has then."""
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append((path, names(path)))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(command, place, text):
    argv = ("train", *FAST, *MEMORY, "--text", text)
    assert command(*argv, "--save-dir", "s", "--save-every", 2).code == 0
    assert command(*argv, "--save-dir", "other").code == 0
    for flags, part in (
        ((), "another run, step000004 for one"),
        (("--resume", "other"), "another run than other"),
        (("--resume", "s/step000002"), "step000004, which is later"),
    ):
        outcome = command(*argv, "--save-dir", "s", *flags)
        assert outcome.code == 1
        assert outcome.err.count("\n") == 1
        assert part in outcome.err
    assert names(place / "s") == ["step000002", "step000004"]


@pytest.mark.parametrize("below", [".", "s", "s/t"])
def test_a_directory_that_cannot_be_made_is_refused(command, place, text, below):
    outcome = command("train", *FAST, *MEMORY, "--text", text, "--save-dir", text / below)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "is a file" in outcome.err
    assert names(place) == []


def test_missing_parents_are_made_and_go_with_a_run_that_saves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b" / "s"
    synced = noted_syncs(monkeypatch)
    with open_saves(path, None, Ranks(None)):
        assert synced == [(tmp_path, ["a"]), (tmp_path / "a", ["b"]), (path.parent, ["s"])]
        for made in (path, *path.parents[:2]):
            assert made.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == []


def test_something_else_where_a_checkpoint_is_to_be(tmp_path):
    (tmp_path / "step000004").mkdir()
    check_save_directory(tmp_path, None)  # an empty one is replaced
    (tmp_path / "step000004" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"step000004, which is no checkpoint"):
        check_save_directory(tmp_path, None)


def test_two_runs_do_not_save_in_one_directory(tmp_path):
    with open_saves(tmp_path / "s", None, Ranks(None)):
        with (
            pytest.raises(ConfigError, match="another run saves"),
            open_saves(tmp_path / "s", None, Ranks(None)),
        ):
            pass
        assert (tmp_path / "s").is_dir()
    assert not (tmp_path / "s").exists()


def test_checkpoints_that_will_not_fit_are_refused_before_the_first_step(command, place, text):
    with pytest.raises(OutOfSpaceError, match=r"3 checkpoints of 1.0 PiB|3 checkpoints of 1024"):
        Saves(place, 2, Ranks(None)).check_room(10, 2**50)
    Saves(place, 2, Ranks(None)).check_room(10, 1)


def test_a_signal_saves_what_was_done(command, place, text):
    with start_child(place, text, "--save-dir", "s", *MEMORY) as child:
        wait_for_step(child)
        out, _ = end(child, signal.SIGINT)
    assert child.returncode == 130
    [name] = names(place / "s")
    step = int(name.removeprefix("step"))
    assert f"{step} of 1000000" in out
    assert "1 checkpoint of" in out
    resumed = command("train", "--quiet", *MEMORY, "--resume", "s", "--steps", step + 1)
    assert f"after {step} of an earlier run" in resumed.out
