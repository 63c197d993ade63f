"""What fails on one rank ends all of them with its message, soon, and leaves them equal."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.group import Run
from distributed.programs import (
    MAKES,
    copies,
    differing,
    make_model,
    offloaded,
    plain_steps,
    set_gradients,
)

Ranks = Callable[..., list[Any]]


def error_of(call: Callable[[], object]) -> str:
    """Return what a call raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrap_on_a_full_drive(directory: Path, full: bool) -> None:
    """Wrap where space is taken by somebody else after it was looked at."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if full:
            patch.setattr("optstream.store.linux.fallocate", refuse)
        offloaded(MAKES["adamw"], make_model(), directory)


def wrap_with_faults(directory: Path) -> list[str]:
    """Wrap with something wrong or different on rank 1; return this rank's error for each."""
    odd = dist.get_rank() == 1
    file = directory / "file"
    file.touch()
    wrong: dict[str, Any] = {
        "directory": lambda: offloaded(
            MAKES["adamw"], make_model(), file if odd else directory / "state"
        ),
        "memory": lambda: offloaded(
            MAKES["adamw"], make_model(), "/dev/shm/state" if odd else directory / "state"
        ),
        "full": lambda: wrap_on_a_full_drive(directory / "state", odd),
        "window": lambda: offloaded(
            MAKES["adamw"], make_model(), directory, window="128KiB" if odd else "64KiB"
        ),
        "bad window": lambda: offloaded(
            MAKES["adamw"], make_model(), directory, window="64KiB" if not odd else "lots"
        ),
        "optimizer": lambda: offloaded(MAKES["sgd" if odd else "adamw"], make_model(), directory),
        "model": lambda: offloaded(
            MAKES["adamw"], make_model(torch.bfloat16 if odd else torch.float32), directory
        ),
        "lr": lambda: offloaded(
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1 + odd), make_model(), directory
        ),
        "metrics": lambda: offloaded(
            MAKES["adamw"],
            make_model(),
            directory,
            metrics=directory / ("missing/m.jsonl" if odd else "m.jsonl"),
        ),
    }
    errors = [error_of(call) for call in wrong.values()]
    with offloaded(MAKES["adamw"], make_model(), directory / "state"):
        pass  # a group that failed is no obstacle to the next
    return errors


def test_nothing_is_wrapped_unless_all_ranks_agree(ranks: Ranks, tmp_path: Path) -> None:
    expected = [
        ("StoreError: .*file is no directory", "RankError: rank 1 failed: .*is no directory"),
        ("StoreError: /dev/shm", "RankError: rank 1 failed: /dev/shm.* is tmpfs"),
        ("OutOfSpaceError: state needs", "RankError: rank 1 failed: state needs .* free"),
        ("RankError: window is 65536 on rank 0 and 131072 on rank 1",) * 2,
        ("ConfigError: window='lots'", "RankError: rank 1 failed: window='lots'"),
        ("RankError: the optimizer is AdamW on rank 0 and SGD on rank 1",) * 2,
        (r"RankError: parameter scale is \(\) torch.float32 .* on rank 0 and .*bfloat16",) * 2,
        ("RankError: 'lr' of group 0 is 0.1 on rank 0 and 1.1 on rank 1",) * 2,
        ("ConfigError: cannot write metrics", "RankError: rank 1 failed: cannot write metrics"),
    ]
    found = ranks(3, wrap_with_faults, tmp_path)
    for index, (own, others) in enumerate(expected):
        for rank, errors in enumerate(found):
            assert_matches(errors[index], own if rank == 1 else others)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {name for name in left if not name.startswith("meeting")} - {"state"} == {"file"}


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(text)


def fail_once(name: str, number: int) -> None:
    """Let one call of an os function fail."""
    real = getattr(os, name)

    def failing(*args: Any) -> Any:
        setattr(os, name, real)
        raise OSError(number, os.strerror(number))

    setattr(os, name, failing)


def make_layers() -> nn.Module:
    """Return so many matrices that each of three ranks has more windows than slots."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in range(18)).to(torch.bfloat16)


def steps_with_faults(directory: Path) -> Any:
    """Let one transfer of rank 1 fail in a step; finish that step, and take another."""
    found = []
    for name in ("preadv", "pwritev"):
        model = make_layers()
        params = list(model.parameters())
        with offloaded(MAKES["muon"], model, directory) as optimizer:
            set_gradients(params, 0)
            optimizer.step()
            set_gradients(params, 1)
            if dist.get_rank() == 1:
                fail_once(name, errno.EIO)
            start = time.monotonic()
            errors = []
            for _ in range(3):
                errors.append(error_of(optimizer.step))
                halfway = copies(model)
                if "was applied in full" in errors[-1] or not errors[-1]:
                    break
            took_s = time.monotonic() - start
            set_gradients(params, 2)
            optimizer.step()
            found.append((errors, halfway, took_s, copies(model)))
    return found


def test_a_failed_transfer(ranks: Ranks, tmp_path: Path) -> None:
    *_, expected = plain_steps(MAKES["muon"], make_layers(), 3)
    found = ranks(3, steps_with_faults, tmp_path)
    for case, name in enumerate(("read", "write")):
        for rank, results in enumerate(found):
            errors, halfway, took_s, after = results[case]
            own = f"Window{name.title()}Error: cannot {name}"
            assert_matches(
                errors[0], own if rank == 1 else f"RankError: rank 1 failed: cannot {name}"
            )
            assert took_s < 10
            assert not differing(halfway, found[0][case][1])
            assert not differing(after, expected)


def gradients_that_differ(directory: Path) -> list[str]:
    """Take steps for which ranks do not have what they need; then one for which they have."""
    model = make_model()
    params = list(model.parameters())
    errors = []
    with offloaded(MAKES["adamw"], model, directory) as optimizer:
        before = copies(model)
        set_gradients(params, 0)
        if dist.get_rank() == 1:
            for param in params:
                param.grad = None
        errors.append(error_of(optimizer.step))
        set_gradients(params, 0)
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 7.0
        errors.append(error_of(optimizer.step))
        assert not differing(before, copies(model))
        optimizer.param_groups[0]["lr"] = 1e-2
        errors.append(error_of(optimizer.state_dict))
        optimizer.step()
        after = copies(model)
    *_, expected = plain_steps(MAKES["adamw"], make_model(), 1)
    assert not differing(after, expected)
    return errors


def test_a_step_that_ranks_do_not_agree_on(ranks: Ranks, tmp_path: Path) -> None:
    for errors in ranks(2, gradients_that_differ, tmp_path):
        assert_matches(errors[0], r"RankError: .*has a gradient on rank 0 and none on rank 1")
        assert_matches(errors[1], r"RankError: 'lr' of group 0 is 0.01 on rank 0 and 7.0 on rank 1")
        assert_matches(errors[2], r"CheckpointError: state_dict\(\) on 2 ranks")


def one_is_killed(directory: Path) -> Any:
    """Step until rank 1 is gone; return the error and how long it took to notice."""
    model = make_model()
    params = list(model.parameters())
    optimizer = offloaded(MAKES["adamw"], model, directory)
    set_gradients(params, 0)
    optimizer.step()
    if dist.get_rank() == 1:
        state = optimizer._state
        update = state._updater.update

        def die(*args: Any) -> None:
            update(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        state._updater.update = die  # type: ignore[method-assign]
    start = time.monotonic()
    errors = [error_of(optimizer.step), error_of(optimizer.step)]
    optimizer.close()
    return errors, time.monotonic() - start


def test_a_rank_that_is_killed(outcomes: Run, tmp_path: Path) -> None:
    found = outcomes(3, one_is_killed, tmp_path / "state")
    assert found[1].value is None
    assert found[1].error is None
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].trace
        errors, took_s = found[rank].value
        for error in errors:
            assert_matches(error, f"RankError: rank {rank} cannot reach the other ranks")
        assert took_s < 20
