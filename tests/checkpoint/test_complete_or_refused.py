"""What is missing, left over, of another kind, damaged or newer is refused and named."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import optstream
from checkpoint.runs import (
    SHAPES,
    adamw,
    after,
    assert_same_bits,
    assert_same_state,
    copied,
    go_on,
    set_weights,
    streamed,
    weights,
)
from optstream import OffloadError
from optstream.optimizer import StreamedOptimizer
from parity.cases import make_params

Checkpoint = tuple[Path, StreamedOptimizer, list[torch.nn.Parameter]]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A checkpoint after two steps, and the optimizer, which went on for a third."""
    params, optimizer = streamed(tmp_path / "live")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        go_on(params, optimizer, [2])
        yield tmp_path / "checkpoint", optimizer, params


def refuses(optimizer: StreamedOptimizer, load: Callable[[], object], match: str) -> None:
    """Check that a load is refused by name and changes nothing."""
    before = copied(optimizer.state_dict())
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(OffloadError, match=match):
        load()
    assert_same_state(copied(optimizer.state_dict()), before)
    assert groups == optimizer.param_groups


def test_state_dicts_that_do_not_fit(saved: Checkpoint) -> None:
    _, optimizer, _ = saved

    def changed(change: Callable[[dict[int, Any]], object]) -> Callable[[], object]:
        def load() -> None:
            given = optimizer.state_dict()
            change(given["state"])
            optimizer.load_state_dict(given)

        return load

    for change, match in (
        (lambda s: s.pop(1), "has no 'group0.param1', which"),
        (lambda s: s[0].pop("exp_avg"), "has no 'group0.param0'/exp_avg, which"),
        (lambda s: s[0].pop("step"), "has no 'group0.param0'/step, which"),
        (lambda s: s[0].update(more=torch.zeros(3)), "has 'group0.param0'/more, which"),
        (lambda s: s.update({77: {"step": 1}}), "has '77', which"),
        (lambda s: s[0].update(exp_avg=torch.zeros(7)), r"'group0.param0'/exp_avg \(\(7,\), need"),
        (lambda s: s[0].update(exp_avg=s[0]["exp_avg"].double()), r"exp_avg \(torch.float64, need"),
        (lambda s: s[0].update(exp_avg=s[0]["exp_avg"].int()), r"exp_avg \(torch.int32, need"),
        (lambda s: s[0].update(exp_avg=None), "has no 'group0.param0'/exp_avg"),
        (lambda s: s.clear(), r"has no 'group0.param0', 'group0.param1', 'group0.param2' and 3 m"),
    ):
        refuses(optimizer, changed(change), match)


def test_other_groups(saved: Checkpoint, tmp_path: Path) -> None:
    path, optimizer, _ = saved
    params = make_params(SHAPES)
    split = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.01)
    with optstream.offload(split, tmp_path / "other", window="64KiB") as other:
        with pytest.raises(OffloadError, match="1 param_groups, this optimizer has 2"):
            other.load(path)
        with pytest.raises(OffloadError, match=r"groups of \[6\] parameters, this .* \[2, 4\]"):
            other.load_state_dict(optimizer.state_dict())
    for bad in ({}, {"state": {}}, {"state": {}, "param_groups": 3}, {"param_groups": [{}]}):
        with pytest.raises(OffloadError, match=r"no state_dict|groups of"):
            optimizer.load_state_dict(bad)


def test_another_optimizer_shape_or_model(saved: Checkpoint, tmp_path: Path) -> None:
    path, _, _ = saved
    for kind, match in (
        (lambda p: torch.optim.Adam(p, foreach=False), r"saved by torch.optim.adamw.AdamW, this"),
        (lambda p: adamw(p, amsgrad=True), "has no 'group0.param0'/max_exp_avg_sq"),
    ):
        _, other = streamed(tmp_path / "other", kind=kind)
        with other:
            refuses(other, lambda other=other: other.load(path), match)
    _, other = streamed(tmp_path / "other", shapes=((90, 130), (7,), (4099, 2), (), (0, 3), (9,)))
    with other:
        refuses(other, lambda: other.load(path), r"param2' \(\(2, 4099\), needed \(4099, 2\)\)")
    _, other = streamed(tmp_path / "other", shapes=SHAPES[:5])
    with other:
        refuses(other, lambda: other.load(path), "unknown 'group0.param5'")
    _, other = streamed(tmp_path / "other", shapes=(*SHAPES, (3,)))
    with other:
        refuses(other, lambda: other.load(path), "lacks 'group0.param6'")


def test_a_shape_without_state_is_compared_too(tmp_path: Path) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, foreach=False)

    params, optimizer = streamed(tmp_path / "a", kind=sgd, shapes=((4, 5), (6,)))
    _, other = streamed(tmp_path / "b", kind=sgd, shapes=((5, 4), (6,)))
    with optimizer, other:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "checkpoint")
        refuses(other, lambda: other.load(tmp_path / "checkpoint"), r"group0.param0' \(\(4, 5\), n")


# -- damage


def window_files(path: Path) -> list[Path]:
    return sorted(path.glob("rank*/*"))


def test_a_missing_truncated_longer_or_foreign_file(saved: Checkpoint, tmp_path: Path) -> None:
    path, optimizer, _ = saved
    damages: dict[str, Callable[[Path], object]] = {
        "cannot be opened: No such file": lambda file: file.unlink(),
        "truncated": lambda file: os.truncate(file, file.stat().st_size - 4096),
        "the manifest says": lambda file: os.truncate(file, file.stat().st_size + 4096),
        "no ordinary file": lambda file: (file.unlink(), os.mkfifo(file)),
        "cannot be opened: Too many levels": lambda file: (file.unlink(), file.symlink_to("a")),
        "cannot be opened: Not a directory": lambda file: (
            file.parent.rename(tmp_path / "elsewhere"),
            file.parent.symlink_to(tmp_path / "elsewhere"),
        ),
    }
    for match, damage in damages.items():
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        damage(window_files(copy)[1])
        refuses(optimizer, lambda copy=copy: optimizer.load(copy), match)
        with pytest.raises(OffloadError, match=match):
            optstream.verify(copy)
        shutil.rmtree(copy)
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
    shutil.copytree(path, tmp_path / "mixed")
    files = window_files(tmp_path / "mixed")
    swap = tmp_path / "swap"
    files[0].rename(swap)
    files[1].rename(files[0])
    swap.rename(files[1])
    with pytest.raises(OffloadError):
        optstream.verify(tmp_path / "mixed")
    with pytest.raises(OffloadError):
        optimizer.load(tmp_path / "mixed")


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_verify_finds_a_flipped_bit_anywhere(saved: Checkpoint, tmp_path: Path) -> None:
    path, _, _ = saved
    optstream.verify(path)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    optstream.verify(copy)
    for file in window_files(copy):
        size = file.stat().st_size
        for position in (0, 9, 4095, 4096, size // 2, size - 1):
            flip(file, position)
            with pytest.raises(OffloadError, match=file.name):
                optstream.verify(copy)
            flip(file, position)
    optstream.verify(copy)


@pytest.mark.parametrize("check", [False, True])
def test_a_flipped_bit_of_adopted_files(check: bool, saved: Checkpoint, tmp_path: Path) -> None:
    """It is found before anything is changed, or by the step that needs it, with the way out."""
    path, _, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    params, optimizer = streamed(tmp_path / "other")
    with optimizer:
        set_weights(params, after(2))
        file = window_files(copy)[1]
        flip(file, 4096)
        if check:
            with pytest.raises(OffloadError, match=file.name):
                optimizer.load(copy, check=True)
            go_on(params, optimizer, [2])  # nothing was changed: as new
            return
        optimizer.load(copy)
        for _ in range(2):
            with pytest.raises(
                OffloadError, match=rf"{file}: their digest.*load another.*group0\.param0/exp_avg"
            ):
                go_on(params, optimizer, [2])
        with pytest.raises(OffloadError, match="step failed after 1 windows"):
            optimizer.save(tmp_path / "new")
        with pytest.raises(OffloadError, match="step failed after 1 windows"):
            optimizer.state_dict()
        # the way out
        set_weights(params, after(2))
        optimizer.load(path)
        go_on(params, optimizer, [2, 3])
    assert_same_bits(weights(params), after(4))


def test_a_flipped_bit_where_files_are_copied_changes_nothing(
    saved: Checkpoint, tmp_path: Path
) -> None:
    path, _, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    flip(window_files(copy)[-1], 5000)
    params, optimizer = streamed(tmp_path / "other", window="16MiB")
    with optimizer:
        go_on(params, optimizer, [0])
        refuses(optimizer, lambda: optimizer.load(copy), "their digest")


# -- the manifest


def resealed(path: Path, change: Callable[[Any], object]) -> None:
    """Change a manifest's body and give it the digest that belongs to it."""
    file = path / "manifest.json"
    document = json.loads(file.read_bytes())
    change(document["body"])
    body = json.dumps(document["body"], separators=(",", ":"))
    head = {"format": "optstream", "version": document["version"]}
    head["xxh3"] = xxhash.xxh3_64_hexdigest(body.encode())
    file.write_bytes((json.dumps(head)[:-1] + ', "body": ' + body + "}\n").encode())


def test_every_changed_or_lost_byte_of_the_manifest_is_noticed(saved: Checkpoint) -> None:
    path, _, _ = saved
    file = path / "manifest.json"
    whole = file.read_bytes()
    generator = random.Random(0)
    places = [*range(80), *generator.sample(range(len(whole)), 300), *range(-3, 0)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(OffloadError, match="manifest"):
            optstream.verify(path)
    for length in (0, 1, 50, *generator.sample(range(len(whole)), 60), len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(OffloadError, match="manifest"):
            optstream.verify(path)
    utf_16 = whole.decode().encode("utf-16")
    garbage = (b"\xff" * 100, b"[" * 100_000, b"null", b"[]", b'{"format": 1}')
    for other in (*garbage, whole + b"\n", utf_16):
        file.write_bytes(other)
        with pytest.raises(OffloadError, match="manifest"):
            optstream.verify(path)
    file.write_bytes(whole)
    optstream.verify(path)


def tensor_of(body: Any, param: int = 0) -> Any:
    return body["params"][f"group0.param{param}"]["tensors"]["exp_avg"]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["windows"][0].update(file="../../secret"),
        lambda b: b["windows"][0].update(file="/etc/passwd"),
        lambda b: b["windows"][0].update(file="rank00000/../../x/window00000.safetensors"),
        lambda b: b["windows"][0].update(file="manifest.json"),
        lambda b: b["windows"][0].update(file="rank00000/window00000.safetensors\0"),
        lambda b: b["windows"][0].update(file=None),
        lambda b: b["windows"][0].update(header_bytes=0),
        lambda b: b["windows"][0].update(header_bytes=-4096),
        lambda b: b["windows"][0].update(header_bytes=2**70),
        lambda b: b["windows"][0].update(header_bytes="many"),
        lambda b: b["windows"][0].update(data_bytes=4096),
        lambda b: b["windows"][0].update(data_bytes=2**62),
        lambda b: b["windows"][0]["digests"].pop(),
        lambda b: b["windows"][0]["digests"].append("12"),
        lambda b: b["windows"][0]["digests"].__setitem__(0, "xyz"),
        lambda b: b["windows"].pop(),
        lambda b: b["windows"].clear(),
        lambda b: b.update(windows=7),
        lambda b: b.update(piece_bytes=0),
        lambda b: b.update(piece_bytes=-1),
        lambda b: b.update(step="x"),
        lambda b: b.update(step="5"),
        lambda b: b.update(step=-5),
        lambda b: b.update(step=True),
        lambda b: b.update(rank_windows=[]),
        lambda b: b.update(rank_windows=[1000]),
        lambda b: b.update(piece_bytes=2**61),
        lambda b: b.update(optimizer=7),
        lambda b: b["groups"][0].update(values=[1, 2]),
        lambda b: b["groups"][0].update(values={"dict": []}),
        lambda b: b["groups"][0]["values"]["dict"].append(["lr", "x"]),
        lambda b: b["params"]["group0.param0"].update(kept={"dict": [["step", "abc"]]}),
        lambda b: b.update(params=[]),
        lambda b: b.update(groups=[{"params": ["nobody"], "values": {"dict": []}}]),
        lambda b: b.update(groups=[{"params": [], "values": 5}]),
        lambda b: b["groups"][0].update(values={"pickle": "gASV"}),
        lambda b: b["groups"][0].update(values={"tensor": {"dtype": "float32"}}),
        lambda b: b["groups"][0].update(
            values={"tensor": {"dtype": "float32", "shape": [2**40], "data": ""}}
        ),
        lambda b: b["groups"][0].update(
            values={"tensor": {"dtype": "load", "shape": [1], "data": "AAAA"}}
        ),
        lambda b: b["groups"][0].update(values={"dict": [[["a"], 1]]}),
        lambda b: b.pop("optimizer"),
        lambda b: tensor_of(b).update(dtype="object"),
        lambda b: tensor_of(b).update(shape=[-90, -130]),
        lambda b: tensor_of(b).update(shape=[90, 131]),
        lambda b: tensor_of(b).update(shape=[0, 2**100]),
        lambda b: tensor_of(b).update(shape=[True, 11700]),
        lambda b: tensor_of(b).update(stride=[1000, 1]),
        lambda b: tensor_of(b).update(stride=[1]),
        lambda b: tensor_of(b)["pieces"][0].__setitem__(0, 99),
        lambda b: tensor_of(b)["pieces"][0].__setitem__(0, -1),
        lambda b: tensor_of(b)["pieces"][0].__setitem__(1, 64),
        lambda b: tensor_of(b)["pieces"][0].__setitem__(1, 2**50),
        lambda b: tensor_of(b)["pieces"][0].pop(),
        lambda b: tensor_of(b)["pieces"].pop(),
        lambda b: tensor_of(b)["pieces"].reverse(),
        lambda b: tensor_of(b, 4).update(stride=[2**64, 1]),
        lambda b: tensor_of(b, 4).update(shape=[0, 2**62, 2**62], stride=None, codec="bf16"),
        lambda b: b["params"]["group0.param0"].update(kept=[1]),
        lambda b: b["params"]["group0.param0"].update(unplanned={"dict": [[0, 1]]}),
        lambda b: b["params"]["group0.param0"].update(shape=None),
    ],
)
def test_a_crafted_manifest_is_malformed(change: Callable[[Any], Any], saved: Checkpoint) -> None:
    path, optimizer, _ = saved
    resealed(path, change)
    with pytest.raises(OffloadError):
        optimizer.load(path)


def in_shards(body: Any, *shards: Any) -> None:
    tensor = tensor_of(body)
    pieces = tensor.pop("pieces")
    tensor.update(stride=None, shards=[{"at": at, "pieces": pieces} for at in shards])


ALL = [[0, 90], [0, 130]]


@pytest.mark.parametrize(
    "shards",
    [
        [[[0, 89], [0, 130]]],
        [[[0, 91], [0, 130]]],
        [[[1, 91], [0, 130]]],
        [[[0, 90, 90], [0, 130]]],
        [[[0, 45, 44, 89], [0, 130]]],
        [[[45, 90, 0, 45], [0, 130]]],
        [[[0, 0, 0, 90], [0, 130]]],
        [[[-1, 89], [0, 130]]],
        [[[0, 90]]],
        [[[0, 90], [0, 130], [0, 1]]],
        [ALL, ALL],
        [],
        [7],
        ["ab"],
    ],
)
def test_shards_that_do_not_make_up_a_tensor_are_malformed(
    shards: list[Any], saved: Checkpoint
) -> None:
    path, optimizer, _ = saved
    resealed(path, lambda body: in_shards(body, *shards))
    with pytest.raises(OffloadError, match="malformed"):
        optimizer.load(path)


def test_one_shard_that_is_all_is_a_tensor(saved: Checkpoint) -> None:
    path, optimizer, params = saved
    resealed(path, lambda body: in_shards(body, [[0, 45, 45, 90], [0, 130]]))
    optimizer.load(path)
    set_weights(params, after(2))
    go_on(params, optimizer, [2])
    assert_same_bits(weights(params), after(3))


def test_a_newer_version_is_refused(saved: Checkpoint) -> None:
    path, optimizer, _ = saved
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"version": 1', b'"version": 4'))
    for load in (lambda: optimizer.load(path), lambda: optstream.verify(path)):
        with pytest.raises(OffloadError, match="version 4, this reads up to 3; update optstream"):
            load()


def test_what_is_no_checkpoint(saved: Checkpoint, tmp_path: Path) -> None:
    _, optimizer, _ = saved
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("empty", "file", "missing"):
        refuses(optimizer, lambda name=name: optimizer.load(tmp_path / name), "no checkpoint")


def test_files_are_private(saved: Checkpoint) -> None:
    path, _, _ = saved
    assert path.stat().st_mode & 0o777 == 0o700
    for file in path.rglob("*"):
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600), file


def test_hyperparameters_that_need_pickle_are_refused(
    saved: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, optimizer, params = saved
    optimizer.param_groups[0]["mine"] = {1, 2}
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"param_groups\[0\] is a set, which cannot be sav"):
            optimizer.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.tmp").exists()
    del optimizer.param_groups[0]["mine"]
    optimizer.save(path)
    go_on(params, optimizer, [3])
    assert_same_bits(weights(params), after(4))
