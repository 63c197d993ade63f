"""Where the state lives: the same losses everywhere, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

import optstream
from optstream.errors import OutOfSpaceError, WindowWriteError
from optstream.training import updater

SHORT = ("--model", "tiny", "--steps", 4, "--batch-size", 2, "--seq-len", 16)


@pytest.fixture
def losses(command, text, tmp_path):
    """Run a short training and return every loss it measured, all bits, and the bytes it moved."""

    def run(*argv: object) -> tuple[list[float], int]:
        path = tmp_path / "losses.jsonl"
        path.unlink(missing_ok=True)
        outcome = command("train", "--text", text, *SHORT, "--metrics", path, *argv)
        assert outcome.code == 0, outcome.err
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        moved = sum(line.get("read_bytes", 0) + line.get("written_bytes", 0) for line in lines)
        return [line.get("loss", line.get("held_out_loss")) for line in lines], moved

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", ["64KiB", "1MiB", "64MiB"])
def test_streaming_ends_with_the_same_losses_bit_for_bit(losses, place, dtype, window):
    plain, _ = losses("--store", "none", "--dtype", dtype)
    streamed, moved_bytes = losses("--store", "direct", "--dtype", dtype, "--window", window)
    assert streamed == plain
    assert moved_bytes > 10 * 2**20
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_store_ends_with_the_same_losses_and_moves_nothing(losses, dtype):
    plain, _ = losses("--store", "none", "--dtype", dtype)
    assert losses("--store", "memory", "--dtype", dtype, "--window", "1MiB") == (plain, 0)


def test_resident_windows_move_less_and_end_with_the_same_losses(losses, place):
    window = ("--window", "256KiB")
    plain, _ = losses("--store", "none")
    without, all_moved = losses(*window)
    some, some_moved = losses(*window, "--ram", "40%")
    every, none_moved = losses(*window, "--ram", "64MiB")
    assert without == some == every == plain
    assert 0.4 * all_moved < some_moved < 0.8 * all_moved
    assert none_moved == 0
    assert losses("--store", "memory", "--ram", "40%") == (plain, 0)


def test_the_table_says_what_is_resident(command, text):
    outcome = command("train", "--text", text, *SHORT, "--window", "256KiB", "--ram", "2MiB")
    table = " ".join(outcome.out.replace("│", " ").split())
    assert "2.0 MiB of it resident in memory, host buffers at most" in table


def test_the_table_says_what_is_on_the_drive(command, text):
    outcome = command("train", "--text", text, *SHORT, "--window", "256KiB")
    table = " ".join(outcome.out.replace("│", " ").split())
    assert "windows on the drive at optstream-state (--store direct)" in table
    measured = r"on the drive ([\d.]+ MiB), removed at the end"
    on_drive = re.search(measured, table)
    assert on_drive is not None
    assert re.search(r"moved a step [\d.]+ MiB read, [\d.]+ MiB written \([\d.]+ GB/s", table)
    assert f"for the state, which would take {on_drive[1]} in memory" in table
    assert "nothing is saved" in table


def test_the_table_says_when_nothing_is_on_a_drive(command, text, place):
    outcome = command("train", "--text", text, *SHORT, "--store", "memory")
    assert "nothing: the state is in memory" in outcome.out
    assert "in memory (--store memory)" in outcome.out
    assert list(place.iterdir()) == []


@pytest.fixture
def seen_mode(monkeypatch):
    """Note the state directory's permissions while a run uses it."""
    modes = []
    offload = optstream.offload

    def noting(optimizer, directory, **options):
        modes.append(stat.S_IMODE(Path(directory).stat().st_mode))
        return offload(optimizer, directory, **options)

    monkeypatch.setattr(updater.optstream, "offload", noting)
    return modes


def test_a_missing_state_directory_is_made_for_its_owner_and_removed(
    command, text, place, seen_mode
):
    argv = ("train", "--text", text, *SHORT, "--state-dir", "state")
    assert command(*argv).code == 0
    assert seen_mode == [0o700]
    assert list(place.iterdir()) == []


def test_a_state_directory_that_was_there_is_left_as_it_was(command, text, place):
    (place / "state").mkdir()
    (place / "state" / "notes.txt").write_text("mine")
    assert command("train", "--text", text, *SHORT, "--state-dir", "state").code == 0
    assert [path.name for path in (place / "state").iterdir()] == ["notes.txt"]


def test_the_environment_names_the_state_directory(command, text, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTSTREAM_STATE_DIR", str(tmp_path / "elsewhere"))
    outcome = command("train", "--text", text, *SHORT)
    assert outcome.code == 0
    assert "elsewhere" in outcome.err


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs to refuse")
def test_memory_that_looks_like_a_drive_is_refused(command, text):
    path = Path("/dev/shm") / f"optstream-test-{os.getpid()}"
    outcome = command("train", "--text", text, *SHORT, "--state-dir", path, "--quiet")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "tmpfs" in outcome.err
    assert not path.exists()


def test_a_drive_without_room_is_one_line(command, text, place, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OutOfSpaceError(28, "state needs 6.6 MiB, here are 1.0 MiB free; free 5.6 MiB")

    monkeypatch.setattr(updater.optstream, "offload", full)
    outcome = command("train", "--text", text, *SHORT, "--quiet")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "free 5.6 MiB" in outcome.err
    assert list(place.iterdir()) == []


def test_a_drive_that_fails_in_a_step_is_one_line_and_leaves_nothing(
    command, text, place, monkeypatch
):
    step = optstream.StreamedOptimizer.step

    def failing(self, closure=None):
        if self.report is not None and self.report.step == 2:
            raise WindowWriteError("state/window 1", 4096, 8192, 5)
        return step(self, closure)

    monkeypatch.setattr(optstream.StreamedOptimizer, "step", failing)
    outcome = command("train", "--text", text, *SHORT, "--quiet")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert "8192 bytes at offset 4096 of state/window 1" in outcome.err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("window", ["1MiB", "64MiB"])
def test_the_writes_of_the_last_step_are_counted(window, command, text):
    """They are under way when it returns; of a single step they are all there is."""
    outcome = command("train", "--text", text, *SHORT, "--steps", 1, "--window", window)
    table = " ".join(outcome.out.replace("│", " ").split())
    on_drive = re.search(r"on the drive ([\d.]+) MiB, removed at the end", table)
    written = re.search(r"moved a step [\d.]+ \w+ read, ([\d.]+) MiB written", table)
    assert on_drive is not None
    assert written is not None, table
    assert float(written[1]) == pytest.approx(float(on_drive[1]), rel=0.05)
