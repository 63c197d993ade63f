"""One directory serves all ranks of a job, two jobs, and two optimizers of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optstream
from distributed.group import Run
from distributed.programs import MAKES, make_model, offloaded, set_gradients
from optstream.distributed.place import Place, take_places
from optstream.errors import ConfigError

Ranks = Callable[..., list[Any]]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_who_comes_second_takes_the_next_place(tmp_path: Path) -> None:
    places = [Place(tmp_path / "state", "", 0), Place(tmp_path / "state", "", 0)]
    places.append(Place(tmp_path / "state", "actor", 0))
    places.append(Place(tmp_path / "state", "", 12))
    assert names(tmp_path / "state") == [
        "actor-rank00000",
        "rank00000",
        "rank00000.1",
        "rank00012",
    ]
    for place in places:
        place.release()
        place.release()
    assert names(tmp_path / "state") == []


def test_what_is_not_empty_stays(tmp_path: Path) -> None:
    place = Place(tmp_path, "", 0)
    (place.path / "mine").touch()
    place.release()
    assert names(tmp_path / "rank00000") == ["mine"]
    again = Place(tmp_path, "", 0)
    assert again.path == place.path
    again.release()


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("rank0", "data", "my rank00000", "rank00001.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "rank00003").symlink_to(tmp_path / "data")
    (tmp_path / "rank00002").mkdir()  # of a dead run
    Place(tmp_path, "", 0).release()
    assert names(tmp_path) == ["data", "my rank00000", "rank0", "rank00001.old", "rank00003"]


@pytest.mark.parametrize("role", ["a/b", "..", "a b", "ä"])
def test_a_role_is_part_of_a_name(role: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        take_places(tmp_path, role, 0)


def test_all_or_none_of_several_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(optstream.OffloadError, match="is no directory"):
        take_places([tmp_path / "a", tmp_path / "file"], "", 0)
    assert names(tmp_path) == ["file"]


def actor_and_critic(directory: Path) -> Any:
    models = make_model(), make_model(seed=1)
    with (
        offloaded(MAKES["adamw"], models[0], directory, role="actor") as actor,
        offloaded(MAKES["muon"], models[1], directory, role="critic") as critic,
    ):
        dist.barrier()
        there = names(directory)
        dist.barrier()
        for optimizer, model in zip((actor, critic), models, strict=True):
            set_gradients(list(model.parameters()), 0)
            optimizer.step()
    return there


def test_actor_and_critic(ranks: Ranks, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    expected = [f"{role}-rank0000{rank}" for role in ("actor", "critic") for rank in (0, 1)]
    assert ranks(2, actor_and_critic, directory) == [expected, expected]
    assert not directory.exists() or names(directory) == []


def killed(directory: Path) -> None:
    optimizer = offloaded(MAKES["adamw"], make_model(), directory)
    dist.barrier()
    assert optimizer.plan.num_windows  # it lives until the end
    os.kill(os.getpid(), signal.SIGKILL)


def places_after(directory: Path) -> Any:
    with offloaded(MAKES["adamw"], make_model(), directory) as optimizer:
        dist.barrier()
        return names(directory), optimizer.plan.num_windows


def test_a_killed_job_leaves_no_state_and_the_next_takes_its_places(
    outcomes: Run, ranks: Ranks, tmp_path: Path
) -> None:
    directory = tmp_path / "state"
    outcomes(3, killed, directory)
    assert not [path for place in directory.iterdir() for path in place.iterdir()]
    for there, _ in ranks(2, places_after, directory):
        assert there == ["rank00000", "rank00001"]
    assert names(directory) == []  # which the first job made


def test_a_role_in_a_single_process(tmp_path: Path) -> None:
    model = make_model()
    with optstream.offload(torch.optim.SGD(model.parameters()), tmp_path, role="critic"):
        assert names(tmp_path) == ["critic-rank00000"]
    assert names(tmp_path) == []
