"""Run cases on 1, 2 and 4 ranks, all cases of a number of ranks in one start of Megatron."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = ["*.py"]  # `make test-megatron` has an environment with it

TIMEOUT_S = 400
WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]
Outcome = Callable[[int, str, str], str]


def _layout(tagged: str) -> str:
    return tagged.partition(":")[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_ranks(world: int, cases: list[str], directory: Path) -> dict[str, str]:
    result = directory / f"world{world}.json"
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    common = {**os.environ, **rendezvous, "PYTHONPATH": search, "WORLD_SIZE": str(world)}
    shared = directory / "shared"
    shared.mkdir(exist_ok=True)
    common |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    common["OPTSTREAM_TEST_SHARED"] = str(shared)
    ranks = []
    for rank in range(world):
        log = (directory / f"world{world}-rank{rank}.log").open("wb")
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(WORKER), str(result), *cases]
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
    try:
        for process in ranks:
            process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    outcomes: dict[str, str] = json.loads(result.read_text()) if result.exists() else {}
    if any(process.returncode for process in ranks):
        logs = [directory / f"world{world}-rank{rank}.log" for rank in range(world)]
        tails = "\n".join(f"{log.name}: ...{log.read_text()[-3000:]}" for log in logs)
        outcomes.setdefault("", f"ranks ended with {[p.returncode for p in ranks]}\n{tails}")
    return outcomes


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return a function that gives what a case came to: "" where it passed."""
    directory = tmp_path_factory.mktemp("ranks")
    wanted: dict[int, list[str]] = {}
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if call is not None and {"world", "layout", "case"} <= set(call.params):
            values = call.params
            wanted.setdefault(values["world"], []).append(f"{values['layout']}:{values['case']}")
    outcomes: dict[int, dict[str, str]] = {}

    def find(world: int, layout: str, case: str) -> str:
        # what fewer ranks save more ranks load
        for size in (size for size in sorted(wanted) if size <= world and size not in outcomes):
            cases = sorted(dict.fromkeys(wanted[size]), key=_layout, reverse=True)
            outcomes[size] = _run_ranks(size, cases, directory)
        of_world = outcomes[world]
        return of_world.get(
            f"{layout}:{case}", f"not run: {of_world.get('', 'an earlier case failed')}"
        )

    return find
