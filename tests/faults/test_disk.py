"""What the drive refuses when an optimizer is wrapped; through the public functions only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from faults.drive import assert_nothing_left
from faults.model import assert_same, make_optimizer, make_params, reference, set_grads
from optstream.errors import OutOfSpaceError, StoreError

NUM_STEPS = 3
IMAGE_BYTES = 16 * 2**20


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """Mount an ext4 filesystem of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    image, point = tmp_path / "image", tmp_path / "mounted"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, point], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a filesystem: {error}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def big_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1024, 1024)) for _ in range(8)]


def content(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*")} - {"lost+found"}


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for step in range(NUM_STEPS):
        set_grads(params, step)
        optimizer.step()


def test_a_missing_directory_is_made(directory: Path) -> None:
    nested = directory / "a" / "b"
    params = make_params()
    with optstream.offload(make_optimizer(params), nested, window="64KiB") as optimizer:
        assert nested.is_dir()
        train(optimizer, params)
    assert_same(params, reference(torch.float32, NUM_STEPS))
    assert not nested.parent.exists()


def test_a_full_drive_is_told_with_numbers_before_the_first_step(small_drive: Path) -> None:
    directory = small_drive / "state"
    inner = make_optimizer(big_params())
    with pytest.raises(OutOfSpaceError, match=r"state needs 64\.\d MiB, .* has \S+ MiB free"):
        optstream.offload(inner, directory, window="1MiB")
    assert content(small_drive) == set()
    assert_nothing_left(directory)


def test_a_group_that_does_not_fit_is_not_added(small_drive: Path) -> None:
    """Training goes on with the groups there are."""
    params = make_params()
    with optstream.offload(make_optimizer(params), small_drive, window="64KiB") as optimizer:
        for step in range(NUM_STEPS):
            set_grads(params, step)
            optimizer.step()
            with pytest.raises(OutOfSpaceError):
                optimizer.add_param_group({"params": big_params()})
            assert len(optimizer.param_groups) == 1
    assert_same(params, reference(torch.float32, NUM_STEPS))
    assert content(small_drive) == set()


def test_another_filesystem_with_room_helps(small_drive: Path, directory: Path) -> None:
    """Windows are striped: each drive must hold its share, and does."""
    params = make_params()
    drives = [small_drive, directory]
    with optstream.offload(make_optimizer(params), drives, window="64KiB") as optimizer:
        train(optimizer, params)
    assert_same(params, reference(torch.float32, NUM_STEPS))


def test_a_read_only_drive(small_drive: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_drive)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        optstream.offload(make_optimizer(make_params()), small_drive / "state")
    assert content(small_drive) == set()


def test_tmpfs_is_refused(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    directory = shm / f"optstream-{os.getpid()}"
    with pytest.raises(StoreError, match="is tmpfs, so the state would stay in RAM"):
        optstream.offload(make_optimizer(make_params()), directory)
    assert not directory.exists()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreError, match=r"no directory|Not a directory"):
        optstream.offload(make_optimizer(make_params()), file)
    assert file.read_text() == "mine"


OTHER = """
import sys
import torch
import optstream
from faults.model import assert_same, make_optimizer, make_params, reference, set_grads

torch.set_num_threads(1)
params = make_params()
with optstream.offload(make_optimizer(params), sys.argv[1], window="64KiB") as optimizer:
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        print(step, flush=True)
        sys.stdin.readline()
assert_same(params, reference(torch.float32, 3))
"""


def test_two_processes_in_one_directory(directory: Path) -> None:
    """They take turns between steps; neither sees the other."""
    path = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        params = make_params()
        with optstream.offload(make_optimizer(params), directory, window="64KiB") as optimizer:
            for step in range(NUM_STEPS):
                assert child.stdout.readline() == f"{step}\n"
                set_grads(params, step)
                optimizer.step()
                child.stdin.write("\n")
                child.stdin.flush()
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.communicate()
    assert_same(params, reference(torch.float32, NUM_STEPS))
