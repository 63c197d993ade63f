"""What else is where checkpoints are: files, other saves, links, FIFOs, odd paths, parents."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import optstream
from checkpoint.runs import go_on, streamed
from optstream import OffloadError
from optstream.checkpoint import directory as checkpoints
from optstream.optimizer import StreamedOptimizer


@pytest.fixture
def optimizer(tmp_path: Path) -> StreamedOptimizer:
    params, optimizer = streamed(tmp_path / "live")
    go_on(params, optimizer, range(2))
    return optimizer


@pytest.mark.parametrize("name", ["model.pt", "rank00000/notes.txt", "sub/x", "rank00000.bak"])
def test_a_foreign_file_in_a_checkpoint_is_named_before_anything_is_done(
    name: str, optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    path = tmp_path / "latest"
    optimizer.save(path)
    foreign = path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    for _ in range(2):
        with pytest.raises(OffloadError, match=f"no checkpoint alone: it has {name}"):
            optimizer.save(path)
        with pytest.raises(OffloadError, match=f"has {name}, which is no part"):
            optstream.verify(path)
    assert foreign.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "live"]
    optimizer.load(path)
    foreign.unlink()
    if foreign.parent.name == "sub":
        foreign.parent.rmdir()
    optimizer.save(path)
    optstream.verify(path)


@pytest.mark.parametrize("text", ["{}", '{"format": "other"}', "x" * 100])
def test_another_programs_manifest_is_no_checkpoint(
    text: str, optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    path = tmp_path / "web"
    path.mkdir()
    (path / "manifest.json").write_text(text)
    with pytest.raises(OffloadError, match=r"it has manifest\.json"):
        optimizer.save(path)
    assert (path / "manifest.json").read_text() == text


def test_a_window_file_that_the_manifest_does_not_name(
    optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    optimizer.save(tmp_path / "c")
    (tmp_path / "c" / "rank00000" / "window00099.safetensors").touch()
    with pytest.raises(OffloadError, match="window00099"):
        optstream.verify(tmp_path / "c")


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_manifest_that_is_no_ordinary_file(
    kind: str, optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    optimizer.save(tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    manifest.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(manifest)
    else:
        manifest.symlink_to(tmp_path / "elsewhere")
    for call in (optimizer.load, optimizer.save, optstream.verify):
        with pytest.raises(OffloadError, match=r"manifest\.json"):
            call(tmp_path / "c")


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_checkpoint_that_is_replaced_while_it_is_opened(
    when: str, optimizer: StreamedOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is read is of one generation: the old one, or, where that is gone, the new one."""
    path = tmp_path / "latest"
    optimizer.save(path)
    params, other = streamed(tmp_path / "other", shapes=((60, 50), (7,)))
    go_on(params, other, [0])
    real = checkpoints.open_inside if when == "within" else checkpoints.read_inside
    calls = []

    def replace(directory: int, name: str) -> object:
        calls.append(name)
        if len(calls) == 1:
            other.save(path)
        return real(directory, name)

    name = "open_inside" if when == "within" else "read_inside"
    monkeypatch.setattr(checkpoints, name, replace)
    with other:
        other.load(path)
        assert len(calls) > 1
        assert other._reporter.next_step == 2


def test_files_that_are_replaced_before_they_are_taken_over(
    optimizer: StreamedOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    optimizer.save(path)
    params, other = streamed(tmp_path / "other")
    go_on(params, other, range(3))
    real = checkpoints.open_checkpoint

    def replaced(path: Path) -> object:
        snapshot = real(path)
        other.save(path)
        return snapshot

    third_params, third = streamed(tmp_path / "third")
    monkeypatch.setattr("optstream.streamed.loading.open_checkpoint", replaced)
    with other, third:
        third.load(path)
        go_on(third_params, third, [2])
        assert third.state[third_params[0]]["step"] == 3
        expected = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.isfinite(expected).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: str(path / ("a" * 260)),
        lambda path: str(path / ("a" * 253)),
        lambda path: str(path / ("a" * 260) / "b"),
        lambda path: "a\0b",
        lambda path: "/",
        lambda path: "",
        lambda path: str(path / ".."),
        lambda path: str(path / "file" / "x"),
    ],
)
def test_paths_that_cannot_be(
    spoil: Callable[[Path], str], optimizer: StreamedOptimizer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = spoil(tmp_path)
    for call in (optimizer.save, optimizer.load, optstream.verify):
        with pytest.raises(OffloadError):
            call(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "live"]


def test_parents_are_made_private_and_durable(
    optimizer: StreamedOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    optimizer.save(tmp_path / "a" / "b" / "c")
    for made in ("a", "a/b", "a/b/c", "a/b/c/rank00000"):
        assert (tmp_path / made).stat().st_mode & 0o777 == 0o700, made
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
