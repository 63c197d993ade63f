"""`optstream doctor` and `optstream ls`: exit codes, text, JSON, interrupts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optstream.mounts import find_mount
from optstream.store.claim import Claim


@pytest.fixture
def drive(place: Path) -> Path:
    mount = find_mount(place)
    if mount is None or mount.kind in {"tmpfs", "ramfs"}:
        pytest.skip("the temporary directory is in memory; give pytest --basetemp on a drive")
    return place


@pytest.fixture(autouse=True)
def short(monkeypatch):
    from optstream.doctor import bandwidth

    monkeypatch.setattr(bandwidth, "MAX_FILE_BYTES", 16 * 2**20)
    monkeypatch.setattr(bandwidth.measure, "__defaults__", (lambda done, total: None, 0.002))


@pytest.fixture
def refused(place: Path) -> Path:
    path = Path("/dev/shm")
    mount = find_mount(path)
    if mount is None or mount.kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    return path


def test_usable(command, drive):
    outcome = command("doctor", drive / "state")
    assert (outcome.code, outcome.err) == (0, "")
    for part in ("usable", "filesystem", "free", "O_DIRECT", "nameless files", "mixed", "16MiB"):
        assert part in outcome.out
    assert f'offload(optimizer, "{drive}/state", window="' in outcome.out
    assert list(drive.iterdir()) == []


def test_what_is_advised_is_taken(command, drive):
    import torch

    import optstream

    outcome = command("doctor", "--quick", drive)
    (line,) = [line for line in outcome.out.splitlines() if line.strip().startswith("offload(opt")]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], momentum=0.9)
    names = {"optimizer": optimizer, "offload": optstream.offload}
    eval(line.strip(), names).close()


def test_quick_measures_nothing(command, drive):
    outcome = command("doctor", "--quick", "--json", drive)
    (report,) = json.loads(outcome.out)["directories"]
    assert (report["bandwidth"], report["usable"]) == (None, True)
    assert report["settings"]["io_threads"] == 4


def test_not_usable(command, refused):
    outcome = command("doctor", refused)
    assert outcome.code == 1
    assert outcome.err == (
        "optstream: /dev/shm is tmpfs, so the state would stay in RAM; choose a path on a drive, "
        'or store="memory" (--store memory)\n'
    )
    assert outcome.out.startswith("/dev/shm: not usable\n")


def test_one_of_several_is_not_usable(command, drive, refused):
    outcome = command("doctor", "--json", "--quick", drive, refused, drive / "a" / "b")
    assert outcome.code == 1
    facts = json.loads(outcome.out)
    assert [report["usable"] for report in facts["directories"]] == [True, False, True]
    assert facts["directories"][1]["refusal"] in outcome.err
    assert str(drive) in facts["use"]["directories"]


def test_a_directory_twice(command, drive):
    outcome = command("doctor", drive, drive / ".")
    assert (outcome.code, outcome.out) == (1, "")
    assert "is given twice" in outcome.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_nothing(drive, signum):
    source = Path(__file__).parents[2] / "src"
    child = subprocess.Popen(
        [sys.executable, "-m", "optstream", "doctor", str(drive / "state")],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        fds = Path(f"/proc/{child.pid}/fd")
        while child.poll() is None and not _nameless_below(fds, drive):
            time.sleep(0.01)
        child.send_signal(signum)
        out, err = child.communicate(timeout=60)
    assert out == ""
    if signum == signal.SIGKILL:
        assert child.returncode == -signum
    else:
        assert (child.returncode, err) == (128 + signum, f"optstream: stopped by {signum.name}\n")
    assert list(drive.iterdir()) == []


def _nameless_below(fds: Path, directory: Path) -> bool:
    """Tell whether it measures: what it asks the filesystem before has names for a moment."""
    try:
        links = [str(fd.readlink()) for fd in fds.iterdir()]
        return any(link.startswith(f"{directory}/#") for link in links)
    except FileNotFoundError:
        return False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_for_a_terminal(command, drive, monkeypatch, stream, shown):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "stderr", stream())
    command("doctor", drive / "[red]")
    # a name is no markup
    assert (f"measuring {drive}/[red]" in sys.stderr.getvalue()) == shown
    assert shown or sys.stderr.getvalue() == ""


def test_ls_of_this_process(command, drive):
    import torch

    import optstream

    param = torch.nn.Parameter(torch.zeros(2**18))
    optimizer = optstream.offload(torch.optim.SGD([param], momentum=0.9), drive)
    outcome = command("ls", drive)
    assert (outcome.code, outcome.err) == (0, "")
    (row,) = [line for line in outcome.out.splitlines() if line.startswith(str(os.getpid()))]
    assert "1.0 MiB" in row
    facts = json.loads(command("ls", "--json", drive).out)
    (holding,) = facts["here"]
    assert holding["pid"] == os.getpid()
    assert holding["nameless_bytes"] >= 2**20
    optimizer.close()
    assert "no live process" in command("ls", drive).out


def test_ls_purges_what_is_stale(command, drive):
    claim = Claim(drive)
    claim.file(0).write_bytes(bytes(2**20))
    assert "1.0 MiB" not in command("ls", "--purge", drive).out.split("free", 1)[1]
    assert claim.file(0).exists()
    claim.abandon()
    assert f"{claim.path}: 1.0 MiB of a dead process; --purge" in command("ls", drive).out
    assert (
        f"{claim.path}: 1.0 MiB of a dead process, removed" in command("ls", "--purge", drive).out
    )
    assert list(drive.iterdir()) == []


def test_ls_of_no_directory(command, place):
    outcome = command("ls", place / "nowhere")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (f"optstream: {place}/nowhere is no directory; give one that is there\n")


@pytest.mark.parametrize("name", ["loop", "x" * 300, "x/" * 3000, "file", "file/below"])
@pytest.mark.parametrize("argv", [("doctor", "--quick"), ("ls",), ("ls", "--purge"), ("plan",)])
def test_what_is_no_directory_is_one_line(command, drive, argv, name):
    (drive / "loop").symlink_to("loop")
    (drive / "file").write_text("{")
    outcome = command(*argv, drive / name)
    assert outcome.code == 1
    assert outcome.err.startswith("optstream: ")
    assert outcome.err.count("\n") == 1
    assert "--debug" not in outcome.err  # that is for what was not foreseen
    assert "; " in outcome.err


def test_a_name_that_is_no_text(drive):
    path = drive / "caf\udce9"  # as Python reads a byte that is no UTF-8
    path.mkdir()
    argv = [sys.executable, "-m", "optstream", "ls", path]
    outcome = subprocess.run(argv, capture_output=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"caf\\udce9: its filesystem has" in outcome.stdout


def test_ls_shows_nothing_a_terminal_would_obey(command, drive, monkeypatch):
    from optstream.doctor import held

    monkeypatch.setattr(held, "_command", lambda process: "evil\x1b[2J\n" + "x" * 100)
    claim = Claim(drive)
    out = command("ls", drive).out
    assert "evil?[2J?xx" in out
    assert "\x1b" not in out
    claim.release()
