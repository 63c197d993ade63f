"""A small text, an empty directory to run in, and the command as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from optstream.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """What a command leaves: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def sentences(num_sentences: int) -> str:
    """Return text that a model can learn something from, different in every sentence."""
    subjects = ("the drive", "a window", "the optimizer", "one buffer", "every slot")
    verbs = ("reads", "writes", "holds", "updates", "streams")
    lines = [
        f"{subjects[i * 7 % 5]} {verbs[i * i % 5]} {subjects[i // 3 % 5]} {i % 97} times.\n"
        for i in range(num_sentences)
    ]
    return "".join(lines)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are fastest on one thread, and pytest-xdist uses the other cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 40 KB outside of the directory that the command runs in."""
    path = tmp_path / "text.txt"
    path.write_text(sentences(1000))
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty current directory; nothing from the environment."""
    path = tmp_path / "place"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.delenv("OPTSTREAM_STATE_DIR", raising=False)
    return path


@pytest.fixture
def command(place: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process, in the empty directory."""

    def run(*argv: object) -> Outcome:
        capfd.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
