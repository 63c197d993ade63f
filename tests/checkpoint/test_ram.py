"""Checkpoints of runs that keep windows in memory: the same files, the same bits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import optstream
from checkpoint.runs import (
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
from optstream.errors import DigestError, OutOfSpaceError, StoreError

STORES = pytest.mark.parametrize("store", ["direct", "mapped"])
RAMS = (0, "40%", "100%")
LARGE = ((2700, 1024),)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@STORES
@pytest.mark.parametrize("window", ["64KiB", "100KiB"], ids=["linked", "copied"])
@pytest.mark.parametrize(
    ("before", "behind"),
    [(a, b) for a in RAMS for b in RAMS if a != b] + [("40%", "40%"), ("100%", "100%")],
)
def test_resume(
    before: int | str,
    behind: int | str,
    window: str,
    store: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    params, optimizer = streamed(tmp_path / "a", dtype=dtype, store=store, ram=before)
    with optimizer:
        go_on(params, optimizer, range(3))
        optimizer.save(tmp_path / "saved")
        values = weights(params)
        go_on(params, optimizer, range(3, 4))  # into buffers, not into the checkpoint
    optstream.verify(tmp_path / "saved")
    options = {"store": store, "ram": behind, "window": window}
    params, optimizer = streamed(tmp_path / "b", dtype=dtype, seed=1, **options)
    set_weights(params, values)
    with optimizer:
        go_on(params, optimizer, range(2))  # what is resident by then is of another run
        optimizer.load(tmp_path / "saved")
        set_weights(params, values)
        go_on(params, optimizer, range(3, 6))
    assert_same_bits(weights(params), after(6, dtype))


@pytest.mark.parametrize(
    ("store", "other"),
    [("direct", "memory"), ("memory", "direct"), ("direct", "mapped"), ("mapped", "direct")],
)
def test_between_stores(store: str, other: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", store=store, ram="40%")
    with optimizer:
        go_on(params, optimizer, range(3))
        optimizer.save(tmp_path / "saved")
        values = weights(params)
    params, optimizer = streamed(tmp_path / "b", store=other, ram="40%", seed=1)
    with optimizer:
        optimizer.load(tmp_path / "saved")
        set_weights(params, values)
        go_on(params, optimizer, range(3, 6))
    assert_same_bits(weights(params), after(6))


@STORES
@pytest.mark.parametrize("ram", ["40%", "100%"])
def test_a_state_dict_is_of_its_moment(ram: str, store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", store=store, ram=ram)
    with optimizer:
        go_on(params, optimizer, range(2))
        given = optimizer.state_dict()
        then = copied(given)
        looked = {
            f"{index}/{key}": value
            for index, param in enumerate(params)
            for key, value in optimizer.state[param].items()
        }
        assert_same_state(looked, then)
        for step in range(2, 5):
            go_on(params, optimizer, range(step, step + 1))
            assert_same_state(copied(given), then)
            optimizer.state_dict()
        optimizer.load_state_dict(given)
        assert_same_state(copied(optimizer.state_dict()), then)
    assert_same_state(copied(given), then)


def test_state_of_a_plain_optimizer(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", ram="40%")
    plain = adamw(params)
    go_on(params, plain, range(3))
    with optimizer:
        optimizer.load_state_dict(plain.state_dict())
        go_on(params, optimizer, range(3, 5))
        back = optimizer.state_dict()
    plain = adamw(params)
    plain.load_state_dict(back)
    go_on(params, plain, range(5, 6))
    assert_same_bits(weights(params), after(6))


def test_new_state_starts_from_zeros_where_other_state_was(tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", ram="100%")
    values = weights(params)
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}, strict=False)
        set_weights(params, values)
        go_on(params, optimizer, range(3))
    assert_same_bits(weights(params), after(3))


@STORES
def test_a_resident_window_is_held_against_its_digest(store: str, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", store=store, ram="100%")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "saved")
        file = sorted((tmp_path / "saved" / "rank00000").iterdir())[1]
        with file.open("r+b") as changed:
            changed.seek(-8192, os.SEEK_END)
            changed.write(b"changed")
        optimizer.load(tmp_path / "saved")
        with pytest.raises(DigestError, match=file.name):
            go_on(params, optimizer, range(2, 3))


def test_a_save_to_another_filesystem(small_drive: Path, tmp_path: Path) -> None:
    params, optimizer = streamed(tmp_path / "a", ram="40%")
    with optimizer:
        go_on(params, optimizer, range(3))
        optimizer.save(small_drive / "saved", wait=False)
        values = weights(params)
        go_on(params, optimizer, range(3, 5))
    optstream.verify(small_drive / "saved")
    params, optimizer = streamed(tmp_path / "b", ram="40%", seed=1)
    with optimizer:
        optimizer.load(small_drive / "saved")
        set_weights(params, values)
        go_on(params, optimizer, range(3, 6))
    assert_same_bits(weights(params), after(6))


def test_a_save_without_room_for_the_next_writes(small_drive: Path) -> None:
    params, optimizer = streamed(
        small_drive / "a", ram="40%", window="1MiB", shapes=((2700, 1024),)
    )
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(small_drive / "first")
        go_on(params, optimizer, range(2, 4))
        for _ in range(2):  # the second needs a third generation
            with pytest.raises(OutOfSpaceError, match="second generation"):
                optimizer.save(small_drive / "second")
        assert not (small_drive / "second").exists()
        optstream.verify(small_drive / "first")
        go_on(params, optimizer, range(4, 6))
    assert_same_bits(weights(params), after(6, shapes=LARGE))


@STORES
@pytest.mark.parametrize("after_calls", range(6))
def test_a_write_of_a_save_fails(
    after_calls: int,
    store: str,
    tmp_path: Path,
    failing: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The older checkpoint stays, training goes on, the next save is whole."""
    params, optimizer = streamed(tmp_path / "a", store=store, ram="100%")
    with optimizer:
        go_on(params, optimizer, range(2))
        optimizer.save(tmp_path / "saved")
        older = {p.name: p.read_bytes() for p in (tmp_path / "saved" / "rank00000").iterdir()}
        go_on(params, optimizer, range(2, 4))
        failing("pwritev", tmp_path, after=after_calls)
        with pytest.raises(StoreError) as caught:
            optimizer.save(tmp_path / "saved")
        assert caught.value.errno == errno.EIO
        monkeypatch.undo()
        optstream.verify(tmp_path / "saved")
        now = {p.name: p.read_bytes() for p in (tmp_path / "saved" / "rank00000").iterdir()}
        assert now == older
        go_on(params, optimizer, range(4, 5))
        optimizer.save(tmp_path / "saved")
        optstream.verify(tmp_path / "saved")
        optimizer.load(tmp_path / "saved")
        go_on(params, optimizer, range(5, 6))
    assert_same_bits(weights(params), after(6))
