"""What to give `offload` for a directory that was looked at, and what to be wary of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optstream.doctor.bandwidth import THREADS, Bandwidth
from optstream.doctor.disks import Disk
from optstream.doctor.probe import Abilities
from optstream.mounts import Mount
from optstream.store.base import PIECE_BYTES
from optstream.units import PAGE_BYTES, format_bytes

NETWORK_FILESYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.cephfs", "fuse.gcsfuse", "fuse.glusterfs"),
    *("fuse.goofys", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs"),
    *("gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs", "wekafs"),
}
DEFAULT_IO_THREADS = 4
DEFAULT_WINDOW_BYTES = 256 * 2**20
_SMALLEST_WINDOW_BYTES = 8 * 2**20
_MEMORY_SHARE = 4  # the model, its gradients and activations want the rest
_NEARLY_BEST = 0.95  # measurements vary by more than the rest


@dataclass(frozen=True)
class Settings:
    """Arguments of `offload`, with the reason for each.

    Attributes:
        bytes_per_s: what a step moves with them, reads and writes together; None: not measured.
    """

    store: str
    window_bytes: int
    io_threads: int
    bytes_per_s: float | None
    reasons: tuple[str, ...]


def settings_for(bandwidth: Bandwidth | None, available_bytes: int) -> Settings:
    """Return the settings for a usable directory.

    Args:
        available_bytes: memory that this process may still take.
    """
    from optstream.plan import NUM_SLOTS, OVERHEAD_BYTES  # with torch, which takes a second

    io_threads, rate, reason = _io_threads(bandwidth)
    window_bytes = DEFAULT_WINDOW_BYTES
    room_bytes = available_bytes // _MEMORY_SHARE - OVERHEAD_BYTES
    while NUM_SLOTS * window_bytes > room_bytes and window_bytes > _SMALLEST_WINDOW_BYTES:
        window_bytes //= 2
    return Settings(
        store="direct",
        window_bytes=window_bytes,
        io_threads=io_threads,
        bytes_per_s=rate,
        reasons=(
            reason,
            f"{NUM_SLOTS} windows of {format_bytes(window_bytes)} are "
            f"{format_bytes(NUM_SLOTS * window_bytes)} of memory, of "
            f"{format_bytes(available_bytes)} that this process may use",
            'the store is "direct", which keeps no page cache; "mapped" suits hosts whose memory '
            "holds most of the state",
        ),
    )


def _io_threads(bandwidth: Bandwidth | None) -> tuple[int, float | None, str]:
    """Return the fewest threads that are nearly the fastest, their bytes/s, and the reason."""
    rates = {
        num_threads: rate
        for num_threads in THREADS
        if bandwidth and (rate := bandwidth.rate("mixed", PIECE_BYTES, num_threads)) is not None
    }
    if not rates:
        return DEFAULT_IO_THREADS, None, f"{DEFAULT_IO_THREADS} threads: the default, not measured"
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= _NEARLY_BEST * best)
    fastest = max(rates, key=lambda n: rates[n])
    than = f"; {fastest} threads {best / 1e9:.2f} GB/s" if fastest != chosen else ""
    text = f"{chosen} threads move {rates[chosen] / 1e9:.2f} GB/s in reads and writes{than}"
    return chosen, rates[chosen], text


def conduct(abilities: Abilities) -> Iterator[str]:
    """Yield what `offload` would do with such files, and why."""
    if abilities.direct_io:
        asked = f"; the drive asks for {abilities.align_bytes}" if abilities.align_bytes else ""
        yield f"read and write past the page cache (O_DIRECT) by {PAGE_BYTES} bytes{asked}"
    if abilities.reserves:
        yield "reserve all space before the first step (fallocate)"
    if abilities.nameless:
        yield (
            "keep the state in files without a name: a killed run leaves nothing; df shows them, "
            "du does not, optstream ls does"
        )
    if abilities.links:
        yield "save a checkpoint on this filesystem by linking its files: no state bytes move"
    yield from abilities.announced


def find_warnings(
    mount: Mount | None, disks: Sequence[Disk], abilities: Abilities
) -> Iterator[str]:
    """Yield what works but not well, each with what to do."""
    if mount and mount.kind == "overlay":
        yield (
            "overlay: this is a container's own layer, of a size and a drive that are not shown "
            "here; mount a directory of the drive into the container"
        )
    elif mount and mount.kind in NETWORK_FILESYSTEMS:
        yield (
            f"{mount.kind} is a network filesystem: all state crosses the network twice a step; "
            "choose a local drive"
        )
    elif mount and mount.kind.startswith("fuse"):
        yield f"{mount.kind} goes through a process of its own; choose the drive below it"
    for disk in disks:
        if disk.in_memory:
            yield f"{disk.name} is memory and no drive, so the state would stay in RAM; choose one"
        if disk.backing_file:
            yield (
                f"{disk.name} is a file ({disk.backing_file}), not a drive; it is as fast as what "
                "that file is on, and its size may be promised and not there"
            )
    if not abilities.links:
        yield (
            "files here cannot be linked, so that a checkpoint copies the state; "
            "ext4, XFS and btrfs can"
        )
