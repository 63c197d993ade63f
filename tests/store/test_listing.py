"""`optstream ls`: what live processes hold, what dead ones left, and what may be purged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optstream.distributed.place import Place
from optstream.doctor.held import find_held
from optstream.doctor.listing import list_directory
from optstream.errors import StoreError
from optstream.format import build_header, starts_like_ours
from optstream.store import WindowFile
from optstream.store.base import Store
from optstream.store.claim import Claim
from store.holder import tell

Opened = Callable[..., Store]
Mounted = Callable[..., Path]
Holder = Callable[[str], "subprocess.Popen[str]"]

FILES_BYTES = 2 * (2**20 + 4096)


def allocated(holding_bytes: int) -> bool:
    """Tell whether these are the two windows of a holder; a filesystem may add a few blocks."""
    return FILES_BYTES <= holding_bytes <= FILES_BYTES + 64 * 1024


def test_nameless_files_of_another_process(holder: Holder, drive_path: Path) -> None:
    process = holder("nameless")
    listing = list_directory(drive_path, purge=False)
    (holding,) = listing.here
    assert (holding.pid, holding.num_files, holding.named_bytes) == (process.pid, 2, 0)
    assert allocated(holding.nameless_bytes)
    assert holding.directory == str(drive_path)
    assert holding.command.startswith(sys.executable)
    assert listing.nameless_bytes >= holding.nameless_bytes
    assert list(drive_path.iterdir()) == []
    tell(process, "exit")
    process.wait()
    assert list_directory(drive_path, purge=False).here == ()


def test_named_files_of_another_process(holder: Holder, drive_path: Path) -> None:
    process = holder("named")
    listing = list_directory(drive_path, purge=True)
    (holding,) = listing.here
    (claim,) = drive_path.iterdir()
    assert (holding.pid, holding.num_files, holding.nameless_bytes) == (process.pid, 2, 0)
    assert allocated(holding.named_bytes)
    assert (holding.directory, holding.locks) == (str(drive_path), (str(claim),))
    assert (listing.stale, listing.unseen) == ((), ())
    assert tell(process, "check") == "unharmed"


def test_what_a_killed_process_left(holder: Holder, drive_path: Path) -> None:
    live, killed = holder("named"), holder("named")
    killed.kill()
    killed.wait()
    listing = list_directory(drive_path, purge=False)
    (stale,) = listing.stale
    assert allocated(stale.num_bytes)
    assert (Path(stale.path).is_dir(), stale.removed, listing.unseen) == (True, False, ())
    (purged,) = list_directory(drive_path, purge=True).stale
    assert (purged.path, purged.num_bytes, purged.removed) == (stale.path, stale.num_bytes, True)
    assert not Path(stale.path).exists()
    assert list_directory(drive_path, purge=True).stale == ()
    assert tell(live, "check") == "unharmed"


def test_listing_changes_nothing(drive_path: Path) -> None:
    claim = Claim(drive_path)
    claim.file(0).write_bytes(bytes(4096))
    claim.abandon()
    (claim.path / "lock").unlink()  # a purger died in between
    before = sorted(drive_path.rglob("*"))
    (stale,) = list_directory(drive_path, purge=False).stale
    assert sorted(drive_path.rglob("*")) == before
    assert stale.num_bytes == 4096


def test_what_is_not_ours_stays_and_is_said_to(drive_path: Path) -> None:
    claim = Claim(drive_path)
    (claim.path / "notes.txt").write_text("mine")
    claim.abandon()
    (stale,) = list_directory(drive_path, purge=True).stale
    assert not stale.removed
    assert (claim.path / "notes.txt").read_text() == "mine"


def test_a_holder_that_cannot_be_seen(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim(drive_path)
    monkeypatch.setattr("optstream.doctor.held.PROC", drive_path)
    empty = find_held(drive_path.stat().st_dev, drive_path)
    monkeypatch.setattr("optstream.doctor.listing.find_held", lambda device: empty)
    listing = list_directory(drive_path, purge=True)
    assert listing.unseen == (str(claim.path),)
    assert listing.stale == ()
    claim.release()


def test_places_of_ranks(drive_path: Path, opened: Opened) -> None:
    live, dead = Place(drive_path, "", 0), Place(drive_path, "actor", 1)
    claim = Claim(dead.path)
    claim.file(0).write_bytes(bytes(4096))
    store = opened("direct", live.path)
    store.reserve([WindowFile(build_header([], 4096), 4096)])
    listing = list_directory(drive_path, purge=True)
    assert [holding.directory for holding in listing.here] == [str(dead.path), str(live.path)]
    assert (listing.stale, listing.unseen) == ((), ())
    claim.abandon()
    os.close(dead._lock)
    (of_claim, of_place) = list_directory(drive_path, purge=False).stale
    assert (of_claim.path, of_claim.num_bytes) == (str(claim.path), 4096)
    assert (of_place.path, of_place.num_bytes) == (str(dead.path), 0)
    stale = list_directory(drive_path, purge=True).stale
    assert [left.removed for left in stale] == [True, True]
    assert list(drive_path.iterdir()) == [live.path]
    store.close()
    listing = list_directory(drive_path, purge=True)
    assert [(h.num_files, h.nameless_bytes, h.named_bytes) for h in listing.here] == [(0, 0, 0)]
    assert listing.unseen == ()
    live.release()


def test_pages_of_files_count_as_files(drive_path: Path, opened: Opened) -> None:
    store = opened("mapped", drive_path)
    store.reserve([WindowFile(build_header([], 2**20), 2**20)] * 2)
    (holding,) = list_directory(drive_path, purge=False).here
    assert holding.num_files == 2
    assert allocated(holding.nameless_bytes)


def test_two_descriptors_of_a_file_count_once(drive_path: Path, opened: Opened) -> None:
    store = opened("direct", drive_path)
    store.reserve([WindowFile(build_header([], 2**20), 2**20)])
    frozen = store.freeze([0])
    (holding,) = list_directory(drive_path, purge=False).here
    assert frozen
    # the window, and the fresh file of its next write
    assert holding.num_files == 2
    assert allocated(holding.nameless_bytes)


def test_a_checkpoint_is_what_du_shows_too(drive_path: Path, opened: Opened) -> None:
    store = opened("direct", drive_path)
    store.reserve([WindowFile(build_header([], 2**20), 2**20)])
    (frozen,) = store.freeze([0]).values()
    here = os.open(drive_path, os.O_RDONLY)
    os.link(
        f"/proc/self/fd/{frozen.fd}", drive_path / "kept", src_dir_fd=here, follow_symlinks=True
    )
    os.close(here)
    (holding,) = list_directory(drive_path, purge=False).here
    assert (holding.nameless_bytes > 0, holding.named_bytes > 0) == (True, True)


def test_files_of_other_programs_do_not_count(drive_path: Path) -> None:
    fds = []
    for head in (
        b"",
        b"x" * 100,
        (100).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}',
    ):
        fds.append(os.open(drive_path, os.O_RDWR | os.O_TMPFILE, 0o600))
        os.write(fds[-1], head)
    assert list_directory(drive_path, purge=False).here == ()
    for fd in fds:
        os.close(fd)


def test_every_header_is_known_by_its_start() -> None:
    assert starts_like_ours(build_header([], 4096))
    assert not starts_like_ours(b"")


def test_below_and_elsewhere(drive_path: Path, opened: Opened, holder: Holder) -> None:
    (drive_path / "other").mkdir()
    process = holder("nameless")
    listing = list_directory(drive_path / "other", purge=False)
    assert listing.here == ()
    assert process.pid in [holding.pid for holding in listing.elsewhere]
    store = opened("direct", drive_path / "other" / "new")
    store.reserve([WindowFile(build_header([], 4096), 4096)])
    directories = {holding.directory for holding in list_directory(drive_path, purge=False).here}
    assert directories == {str(drive_path), str(drive_path / "other" / "new")}


def test_another_filesystem_is_not_looked_at(
    mounted: Mounted, holder: Holder, drive_path: Path
) -> None:
    holder("nameless")
    listing = list_directory(mounted("ext4"), purge=False)
    assert (listing.here, listing.elsewhere, listing.nameless_bytes) == ((), (), 0)


@pytest.mark.parametrize(("kind", "size"), [("btrfs", {"mib": 160}), ("xfs", {"mib": 320})])
def test_other_filesystems(
    kind: str, size: dict[str, int], mounted: Mounted, opened: Opened
) -> None:
    point = mounted(kind, **size)
    store = opened("direct", point)
    store.reserve([WindowFile(build_header([], 2**20), 2**20)] * 2)
    (holding,) = list_directory(point, purge=False).here
    assert holding.pid == os.getpid()
    assert allocated(holding.nameless_bytes)


def test_files_of_fuse_have_names(mounted: Mounted, opened: Opened) -> None:
    point = mounted("fuse.ext4")
    store = opened("direct", point)
    store.reserve([WindowFile(build_header([], 2**20), 2**20)] * 2)
    listing = list_directory(point, purge=False)
    (holding,) = listing.here
    assert (holding.num_files, len(holding.locks), listing.unseen) == (2, 1, ())


def test_no_directory(drive_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere is no directory"):
        list_directory(drive_path / "nowhere", purge=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_told_what_it_cannot_see(holder: Holder, drive_path: Path) -> None:
    holder("nameless")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from optstream.doctor.listing import list_directory\n"
        "os.setgid(65534), os.setuid(65534)\n"
        "listing = list_directory(Path(sys.argv[1]), purge=True)\n"
        "print(len(listing.here), listing.num_hidden > 0)"
    )
    private = [path for path in (drive_path, *drive_path.parents) if path.stat().st_mode & 5 != 5]
    modes = [path.stat().st_mode for path in private]
    for path in private:
        path.chmod(0o755)
    try:
        found = subprocess.run(
            [sys.executable, "-c", code, str(drive_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for path, mode in zip(private, modes, strict=True):
            path.chmod(mode)
    assert found.stdout == "0 True\n", found.stderr
