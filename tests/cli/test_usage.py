"""Wrong usage: exit code 2, one line that names the flag, nothing done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import optstream

WRONG = {
    "no command": ([], "COMMAND"),
    "unknown command": (["doctors", "."], "doctors"),
    "unknown flag": (["train", "--windows", "64MiB"], "--windows"),
    "abbreviated flag": (["train", "--step", "3"], "--step"),
    "stray word": (["train", "tiny"], "tiny"),
    "flag without value": (["train", "--model"], "--model"),
    "text without file": (["train", "--text"], "--text"),
    "text of an empty name": (["train", "--text", ""], "--text: it is empty"),
    "state directory of an empty name": (["train", "--state-dir", ""], "--state-dir: it is empty"),
    "save directory of an empty name": (["train", "--save-dir", ""], "--save-dir: it is empty"),
    "model of an empty name": (["train", "--model", ""], "--model: it is empty"),
    "unknown store": (["train", "--store", "ssd"], "--store"),
    "unknown optimizer": (["train", "--optimizer", "adamw2"], "--optimizer"),
    "unknown dtype": (["train", "--dtype", "float16"], "--dtype"),
    "window without unit known": (["train", "--window", "64 megs"], "--window"),
    "window negative": (["train", "--window", "-64MiB"], "--window"),
    "window of nothing": (["train", "--window", "0"], "--window"),
    "window too small": (["train", "--window", "63KiB"], "--window"),
    "window of part of a byte": (["train", "--window", "0.3B"], "--window"),
    "ram without unit known": (["train", "--ram", "8 gigs"], "--ram"),
    "ram negative": (["train", "--ram", "-8GiB"], "--ram"),
    "ram above the machine's": (["train", "--ram", "1000TiB"], "--ram"),
    "ram above the state": (["train", "--ram", "101%"], "--ram"),
    "steps zero": (["train", "--steps", "0"], "--steps"),
    "steps negative": (["train", "--steps", "-3"], "--steps"),
    "steps fraction": (["train", "--steps", "1.5"], "--steps"),
    "steps huge": (["train", "--steps", "1" + "0" * 30], "--steps"),
    "batch size zero": (["train", "--batch-size", "0"], "--batch-size"),
    "sequence length zero": (["train", "--seq-len", "0"], "--seq-len"),
    "eval tokens zero": (["train", "--eval-tokens", "0"], "--eval-tokens"),
    "seed negative": (["train", "--seed", "-1"], "--seed"),
    "seed word": (["train", "--seed", "now"], "--seed"),
    "lr zero": (["train", "--lr", "0"], "--lr"),
    "lr not a number": (["train", "--lr", "nan"], "--lr"),
    "lr infinite": (["train", "--lr", "inf"], "--lr"),
    "weight decay negative": (["train", "--weight-decay", "-0.1"], "--weight-decay"),
    "window that does nothing": (["train", "--store", "none", "--window", "1MiB"], "--window"),
    "ram that does nothing": (["train", "--store", "none", "--ram", "25%"], "--ram"),
    "directory that does nothing": (
        ["train", "--store", "none", "--state-dir", "s"],
        "--state-dir",
    ),
    "rate that does nothing": (
        ["train", "--optimizer", "adamw", "--adamw-lr", "1e-3"],
        "--adamw-lr",
    ),
    "comparison with itself": (["train", "--optimizer", "adamw", "--compare"], "--compare"),
    "comparison of a part": (["train", "--compare", "--resume", "r"], "--compare"),
    "saving nowhere": (["train", "--save-every", "5"], "--save-every"),
    "keeping nothing": (["train", "--save-dir", "s", "--keep", "0"], "--keep"),
    "keeping what is not saved": (["train", "--keep", "2"], "--keep"),
    "saving never": (["train", "--save-dir", "s", "--save-every", "0"], "--save-every"),
    "verify nothing": (["verify"], "CKPT"),
    "inspect nothing": (["inspect"], "CKPT"),
    "export nowhere": (["export", "c"], "OUT"),
    "doctor of nothing": (["doctor"], "DIR"),
    "unknown flag of doctor": (["doctor", ".", "--fast"], "--fast"),
    "ls nothing": (["ls"], "DIR"),
    "ls of two": (["ls", ".", ".."], ".."),
    "plan nothing": (["plan"], "MODEL"),
    "plan without units known": (["plan", "7B", "--space", "2 much"], "--space"),
    "plan for nothing": (["plan", "7B", "--memory", "0"], "--memory"),
    "plan for a rate of nothing": (["plan", "7B", "--bandwidth", "0/s"], "--bandwidth"),
    "plan with the RAM of another machine": (["plan", "7B", "--ram", "auto"], "--ram"),
    "plan an unknown codec": (["plan", "7B", "--codec", "fp8"], "--codec"),
    "plan for a rate in bits": (["plan", "7B", "--bandwidth", "20Gb/s"], "20Gb/s' are bits"),
    "plan a life without a step": (["plan", "7B", "--endurance", "1PB"], "--step-time"),
    "plan no model": (["plan", ""], "MODEL"),
    "plan for no ranks": (["plan", "7B", "--ranks", "0"], "--ranks"),
    "plan for more on a node": (["plan", "7B", "--ranks-per-node", "2"], "--ranks-per-node"),
    "plan for no time": (["plan", "7B", "--step-time", "0"], "--step-time"),
    "plan an unknown optimizer": (["plan", "7B", "--optimizer", "lion"], "--optimizer"),
    "unknown flag of inspect": (["inspect", "c", "--yaml"], "--yaml"),
}


def train_nothing(*_: object) -> None:
    """Stand in for a run of minutes, should the usage be taken for right."""
    raise AssertionError("this would have trained")


@pytest.mark.parametrize(("argv", "named"), WRONG.values(), ids=WRONG.keys())
def test_wrong_usage_is_one_line_and_writes_nothing(command, place, monkeypatch, argv, named):
    monkeypatch.setattr("optstream.training.run.train", train_nothing)
    outcome = command(*argv)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert named in outcome.err
    assert "--help" in outcome.err
    assert list(place.iterdir()) == []


def test_version(command):
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"optstream {optstream.__version__}\n")


def test_help_explains_every_flag_with_its_default(command):
    outcome = command("train", "--help")
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    for part in ("--text FILE", "(default: small)", "(default: direct)", "64.0 MiB", "--metrics"):
        assert part in text


def test_empty_variable_for_the_state_directory_is_no_directory(monkeypatch):
    from optstream.cli.train import _default_state_dir

    monkeypatch.setenv("OPTSTREAM_STATE_DIR", "")
    assert _default_state_dir() == Path("optstream-state")
    monkeypatch.setenv("OPTSTREAM_STATE_DIR", "/mnt/nvme0/state")
    assert _default_state_dir() == Path("/mnt/nvme0/state")


def test_help_and_wrong_usage_do_not_wait_for_torch():
    program = (
        "import sys; from optstream.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    for argv in (["--help"], ["--version"], ["train", "--steps", "0"], ["verify", "--help"]):
        child = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True)
        assert child.returncode == 0, argv
