"""Files to documents, and the part that is held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from optstream.errors import ConfigError
from optstream.training.text import default_text, read_corpus

LINES = "".join(f"line {i}\n" for i in range(200))


def write(path: Path, text: str = LINES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_last_twentieth_of_each_document_is_held_out_at_a_line_end(tmp_path):
    corpus = read_corpus([write(tmp_path / "a"), write(tmp_path / "b")])
    for train, held_out in zip(corpus.train, corpus.held_out, strict=True):
        assert train + held_out == LINES
        assert train.endswith("\n")
        assert 0.03 < len(held_out) / len(LINES) <= 0.05


def test_one_long_line_is_cut_inside(tmp_path):
    corpus = read_corpus([write(tmp_path / "a", "word " * 1000)])
    assert [len(corpus.train[0]), len(corpus.held_out[0])] == [4750, 250]


def test_folders_are_read_to_any_depth_in_order_of_name(tmp_path):
    for name in ("b.md", "a/z.txt", "a/b/c.md", "skipped.py"):
        write(tmp_path / "top" / name, name + "\n" * 40)
    corpus = read_corpus([tmp_path / "top"])
    assert [text.split("\n")[0] for text in corpus.train] == ["a/b/c.md", "a/z.txt", "b.md"]


def test_a_file_reached_twice_is_read_once(tmp_path):
    file = write(tmp_path / "a.txt")
    (tmp_path / "link.txt").symlink_to(file)
    assert len(read_corpus([file, tmp_path, tmp_path / "link.txt"]).train) == 1


def test_empty_files_in_a_folder_are_passed_over(tmp_path):
    write(tmp_path / "a.txt")
    write(tmp_path / "empty.md", "")
    assert len(read_corpus([tmp_path]).train) == 1


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    assert read_corpus([tmp_path / "a"]).train[0].startswith("line 0")


def test_the_error_names_the_byte(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"0xff at 3"):
        read_corpus([tmp_path / "a"])


def test_the_default_text_is_the_plays():
    assert len(default_text()) == 38
    corpus = read_corpus([])
    assert any(text.startswith("# Hamlet") for text in corpus.train)
    assert 5_000_000 < sum(map(len, corpus.train + corpus.held_out)) < 5_500_000
