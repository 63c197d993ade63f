"""`optstream verify`, `inspect` and `export` on checkpoints that a training made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.conftest import sentences
from cli.saved import train
from optstream.checkpoint.directory import open_checkpoint
from optstream.training import updater


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def saved(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A checkpoint of Muon, and the state_dict of the plain optimizer when it was saved."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("saved")
    (path / "text.txt").write_text(sentences(1000))
    dicts = []
    save = updater.InMemory.save

    def noting(self: updater.InMemory, target: Path) -> None:
        dicts.append(self.optimizer.state_dict())
        save(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updater.InMemory, "save", noting)
        argv = ("--text", path / "text.txt", "--store", "none", "--dtype", request.param)
        train(path / "m.jsonl", *argv, "--save-dir", path / "s")
    return path / "s" / "step000004", dicts[0]


@pytest.fixture(params=["", "optimizer"])
def path(saved, request) -> Path:
    """The training's directory, and the optimizer's in it."""
    return saved[0] / request.param


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def assert_failed(outcome, *parts: str) -> None:
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


def test_verify_says_so_in_a_line(command, path):
    outcome = command("verify", path)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    assert "as saved" in outcome.out


@pytest.mark.parametrize("position", [-1, 5000])
def test_verify_sees_a_flipped_bit_anywhere(command, saved, tmp_path, position):
    copy = shutil.copytree(saved[0], tmp_path / "copy")
    flip(next(copy.rglob("window00000.safetensors")), position)
    assert_failed(command("verify", copy), "window00000")
    copy = shutil.copytree(saved[0], tmp_path / "copy2")
    flip(copy / "model.safetensors", position)
    assert_failed(command("verify", copy), "model.safetensors", "take another")


@pytest.mark.parametrize("name", ["verify", "inspect", "export"])
def test_what_is_no_checkpoint_is_one_line(command, place, saved, tmp_path, name):
    out = [tmp_path / "out.pt"] if name == "export" else []
    assert_failed(command(name, tmp_path / "nowhere", *out), "nowhere")
    assert_failed(command(name, tmp_path, *out), "no checkpoint")
    assert_failed(command(name, saved[0].parent, *out), "give one of them", "step000004")
    assert list(place.iterdir()) == []


def test_inspect_shows_parameters_states_and_where_they_are(command, path):
    outcome = command("inspect", path)
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    assert str(path.name) in text
    assert "optimizer optstream.muon.muon.Muon" in text
    assert "momentum_buffer float32" in text
    assert "model.embed_tokens.weight" in text
    assert "1 files" in text or "files," in text


def test_inspect_json_adds_up(command, saved):
    facts = json.loads(command("inspect", saved[0], "--json").out)
    assert facts["step"] == facts["training"]["settings"]["steps"] == 4
    states = [s for param in facts["params"].values() for s in param["states"].values()]
    assert sum(state["bytes"] for state in states) == facts["state_bytes"]
    assert sum(window["bytes"] for window in facts["windows"]) == facts["file_bytes"]
    assert facts["training"]["versions"]["torch"] == torch.__version__
    kept = {name for param in facts["params"].values() for name in param["kept"]}
    assert kept == {"step"}


def test_an_exported_torch_file_is_the_plain_optimizers_state_dict(command, path, saved, tmp_path):
    outcome = command("export", path, tmp_path / "o.pt")
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "o.pt").stat().st_mode & 0o777 == 0o600
    given = torch.load(tmp_path / "o.pt", weights_only=True)
    assert_equal(given["state"], saved[1]["state"])
    groups = [dict(group) for group in saved[1]["param_groups"]]
    for group in groups:
        del group["param_names"]
    assert given["param_groups"] == groups
    snapshot = open_checkpoint(saved[0] / "optimizer")
    masters = {
        name: snapshot.state(name, None, tmp_path)["master"]
        for name, param in snapshot.manifest.params.items()
        if "master" in param.tensors
    }
    assert ("masters" in given) == bool(masters)
    assert_equal(given.get("masters", {}), masters)


def assert_equal(given: dict, wanted: dict) -> None:
    assert given.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_equal(given[key], value)
        else:
            assert torch.equal(given[key], value), key
            assert given[key].dtype == value.dtype


def test_exported_safetensors_hold_the_same(command, path, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("optstream.checkpoint.export.FILE_BYTES", 500_000)
    assert command("export", path, tmp_path / "o").code == 0
    index = json.loads((tmp_path / "o" / "index.json").read_text())
    files = {file: load_file(tmp_path / "o" / file) for file in set(index["weight_map"].values())}
    assert len(files) > 3
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(file) for file in files.values()) == len(tensors)
    snapshot = open_checkpoint(saved[0] / "optimizer")
    wanted = {
        f"{name}/{key}": value
        for name in snapshot.manifest.params
        for key, value in snapshot.state(name, None, saved[0]).items()
    }
    assert_equal(tensors, wanted)
    assert index["optimizer"] == "optstream.muon.muon.Muon"
    names = [name for group in index["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(snapshot.manifest.params)


@pytest.mark.parametrize("name", ["o.pt", "o"])
def test_nothing_is_replaced_without_force(command, saved, tmp_path, name):
    assert command("export", saved[0], tmp_path / name).code == 0
    assert_failed(command("export", saved[0], tmp_path / name), "is there", "--force")
    assert command("export", saved[0], tmp_path / name, "--force").code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "place"] == [name]


@pytest.mark.parametrize("name", ["thesis.txt", "index.json"])
def test_force_replaces_no_other_directory(command, saved, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    outcome = command("export", saved[0], tmp_path / "mine", "--force")
    assert_failed(outcome, "is no export")
    assert (tmp_path / "mine" / name).read_text() == "{}"


def test_force_replaces_no_export_with_other_files(command, saved, tmp_path, monkeypatch):
    assert command("export", saved[0], tmp_path / "o").code == 0
    (tmp_path / "o" / "thesis.txt").touch()
    assert_failed(command("export", saved[0], tmp_path / "o", "--force"), "is no export")
    (tmp_path / "o" / "thesis.txt").rename(tmp_path / "thesis.txt")
    monkeypatch.setattr("optstream.durable.exchange", lambda *_: False)
    (tmp_path / "o.old").mkdir()
    assert_failed(command("export", saved[0], tmp_path / "o", "--force"), "o.old", "move it away")
    assert (tmp_path / "o" / "index.json").exists()


@pytest.mark.parametrize(
    ("out", "part"),
    [
        ("no/o.pt", "is missing"),
        ("o.safetensors", "several safetensors files"),
        ("/", "no name of its own"),
        ("place/..", "no name of its own"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(command, saved, tmp_path, out, part):
    assert_failed(command("export", saved[0], tmp_path / out), part)


@pytest.mark.parametrize("name", ["o.pt", "o"])
def test_a_damaged_checkpoint_is_not_exported(command, saved, tmp_path, name):
    copy = shutil.copytree(saved[0], tmp_path / "copy")
    flip(next(copy.rglob("window00000.safetensors")), -1)
    assert_failed(command("export", copy, tmp_path / name), "window00000")
    assert not (tmp_path / name).exists()
    assert not (tmp_path / f"{name}.tmp").exists()


@pytest.mark.parametrize("name", ["o.pt", "o"])
def test_what_appears_during_an_export_is_not_replaced(command, saved, tmp_path, monkeypatch, name):
    def another_writes_there(_: object) -> None:
        if name == "o":
            (tmp_path / name).mkdir()
        theirs.write_text("theirs")

    theirs = tmp_path / name / "x" if name == "o" else tmp_path / name
    monkeypatch.setattr("optstream.checkpoint.directory.verify", another_writes_there)
    assert_failed(command("export", saved[0], tmp_path / name), name)
    assert theirs.read_text() == "theirs"
    assert not (tmp_path / f"{name}.tmp").exists()
