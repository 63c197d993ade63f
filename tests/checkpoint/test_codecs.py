"""Checkpoints of encoded state: resumed, converted, exported, and held against the weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optstream
from checkpoint.runs import (
    SHAPES,
    assert_same_bits,
    assert_same_state,
    copied,
    set_weights,
    weights,
)
from optstream.checkpoint.export import export
from optstream.errors import CheckpointError, OutOfSpaceError
from parity.cases import make_params, train

BF16 = torch.bfloat16
CODECS = ("split", "bf16", "bf16-stochastic", "int8")


def streamed(directory: Path, codec: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = make_params(SHAPES, BF16)
    settings: dict[str, Any] = {"window": "64KiB", "codec": codec, **options}
    inner = torch.optim.AdamW(params, lr=0.01, fused=True)
    return params, optstream.offload(inner, directory, **settings)


def saved(tmp_path: Path, codec: str, steps: int = 3) -> tuple[list[Tensor], dict[str, Any]]:
    """Train, save to tmp_path/"saved", and return the weights and the state of then."""
    params, optimizer = streamed(tmp_path / "first", codec)
    train(params, optimizer, range(steps))
    optimizer.save(tmp_path / "saved")
    state = copied(optimizer.state_dict())
    optimizer.close()
    return weights(params), state


def without_a_stop(codec: str, tmp_path: Path) -> list[Tensor]:
    params, optimizer = streamed(tmp_path / "whole", codec)
    train(params, optimizer, range(6))
    optimizer.close()
    return weights(params)


@pytest.mark.parametrize("options", [{}, {"window": "200KiB"}, {"store": "memory"}], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_a_resumed_run_is_the_same(codec: str, options: dict[str, Any], tmp_path: Path) -> None:
    then, state = saved(tmp_path, codec)
    params, optimizer = streamed(tmp_path / "second", codec, **options)
    set_weights(params, then)
    optimizer.load(tmp_path / "saved")
    assert_same_state(copied(optimizer.state_dict()), state)
    train(params, optimizer, range(3, 6))
    optimizer.close()
    assert_same_bits(weights(params), without_a_stop(codec, tmp_path))


def test_a_load_into_the_same_windows_moves_nothing(tmp_path: Path) -> None:
    then, _ = saved(tmp_path, "int8")
    params, optimizer = streamed(tmp_path / "second", "int8")
    set_weights(params, then)
    optimizer.load(tmp_path / "saved")
    assert optimizer._state.stream.counters.written_bytes == 0
    optimizer.close()


@pytest.mark.parametrize(
    ("old", "new"), [("split", "exact"), ("exact", "split"), ("int8", "bf16"), ("bf16", "exact")]
)
def test_another_codec_is_converted_and_said(
    old: str, new: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    then, state = saved(tmp_path, old)
    params, optimizer = streamed(tmp_path / "second", new)
    set_weights(params, then)
    with caplog.at_level(logging.WARNING, "optstream"):
        optimizer.load(tmp_path / "saved")
    assert "converted from " in caplog.text
    assert f"to {new}" in caplog.text
    if new in ("exact", "split"):
        assert_same_state(copied(optimizer.state_dict()), state)
    train(params, optimizer, range(3, 6))
    optimizer.close()
    if {old, new} == {"split", "exact"}:
        assert_same_bits(weights(params), without_a_stop("exact", tmp_path))


@pytest.mark.parametrize("options", [{}, {"window": "200KiB"}], ids=str)
def test_split_masters_of_other_weights_are_refused(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    then, _ = saved(tmp_path, "split")
    params, optimizer = streamed(tmp_path / "second", "split", **options)
    set_weights(params, then)
    params[2].data[0, 17] += 1
    with pytest.raises(CheckpointError, match=r"'group0\.param2'; load the weights.*strict=False"):
        optimizer.load(tmp_path / "saved")
    with caplog.at_level(logging.WARNING, "optstream"):
        optimizer.load(tmp_path / "saved", strict=False)
    assert "they follow the weights" in caplog.text
    for param in params:
        param.grad = None
    params[2].grad = torch.zeros_like(params[2])
    optimizer.step()
    master = optimizer.state[params[2]]["master"]
    assert master[0, 17].bfloat16() == params[2][0, 17]
    optimizer.close()


def test_state_dict_has_values(tmp_path: Path) -> None:
    outcome = {}
    for codec in ("exact", "split", "int8"):
        params, optimizer = streamed(tmp_path / codec, codec)
        train(params, optimizer, range(3))
        given = optimizer.state_dict()
        view = {
            f"{i}/{key}": v for i, p in enumerate(params) for key, v in optimizer.state[p].items()
        }
        assert_same_state(copied(given), view)
        outcome[codec] = copied(given)
        train(params, optimizer, range(3, 4))  # the snapshot keeps what it has
        assert_same_state(copied(given), outcome[codec])
        optimizer.close()
    assert_same_state(outcome["split"], outcome["exact"])
    name = "0/exp_avg_sq"
    assert torch.allclose(outcome["int8"][name], outcome["exact"][name], rtol=0.3)


def test_a_state_dict_goes_into_any_codec(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "first", "split")
    train(params, optimizer, range(3))
    given, then = optimizer.state_dict(), weights(params)
    others, second = streamed(tmp_path / "second", "split")
    set_weights(others, then)
    second.load_state_dict(given)
    train(others, second, range(3, 6))
    optimizer.close()
    second.close()
    assert_same_bits(weights(others), without_a_stop("split", tmp_path))


@pytest.mark.parametrize("name", ["state.pt", "folder"])
def test_export_decodes_moments_and_says_what_of_masters(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    then, state = saved(tmp_path, "int8")
    with caplog.at_level(logging.WARNING, "optstream"):
        export(tmp_path / "saved", tmp_path / name)
    assert "6 masters are split" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if "decoded" in path.name] == []
    if name.endswith(".pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert "masters" not in found
        plain = torch.optim.AdamW([p.float().requires_grad_() for p in then], fused=True)
        plain.load_state_dict(found)
        kept = {key: value for key, value in state.items() if not key.endswith("/master")}
        assert_same_state(copied(found), kept)


def test_verify_and_a_damaged_byte(tmp_path: Path) -> None:
    saved(tmp_path, "split")
    optstream.verify(tmp_path / "saved")
    file = sorted((tmp_path / "saved/rank00000").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[9000] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(optstream.OffloadError, match="digest"):
        optstream.verify(tmp_path / "saved")


def test_no_room_for_decoded_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = streamed(tmp_path / "first", "bf16")
    train(params, optimizer, range(2))

    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("optstream.checkpoint.decoding.os.posix_fallocate", full)
    before = weights(params)
    with pytest.raises(OutOfSpaceError):
        optimizer.state_dict()
    monkeypatch.undo()
    assert_same_bits(weights(params), before)
    train(params, optimizer, range(2, 3))
    optimizer.close()
