"""How fast a directory is, measured with the transfers of the store, digests included.

Two window files are written once, then each combination of mode, piece and threads runs for a
moment: `read` from one file, `write` to the other, `mixed` both at once, as a step does.

Bounds: at most 1 GiB of the drive and an eighth of what is free, 128 MiB of memory, about 20 s on a
fast drive and 40 s on a slow one; a drive that cannot do a piece in that time takes as long as its
pieces in flight. What there was no time for is left out.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from optstream.doctor.probe import temporary_files
from optstream.mounts import read_free_bytes
from optstream.store.base import PIECE_BYTES
from optstream.store.live import LiveFile

MODES = ("read", "write", "mixed")
PIECES_BYTES = (2**20, PIECE_BYTES, 16 * 2**20)
THREADS = (1, 2, 4, 8)
MAX_FILE_BYTES = 512 * 2**20
_FREE_SHARE = 16  # of what is free, for each of the two files
_FILL_S = 5.0
_CELL_S = 0.4
_TOTAL_S = 40.0

_Move = Callable[[int, memoryview], None]
Progress = Callable[[int, int], None]
"""Is told how many of how many measurements are done."""


@dataclass(frozen=True)
class Cell:
    """One measurement; of `mixed` the bytes of both directions count."""

    mode: str
    piece_bytes: int
    num_threads: int
    bytes_per_s: float


@dataclass(frozen=True)
class Bandwidth:
    """What was measured in a directory.

    Attributes:
        file_bytes: of each of the two files.
        first_write_bytes_per_s: into space that was reserved and never written, by 4 threads.
        cells: in the order they were measured.
    """

    file_bytes: int
    first_write_bytes_per_s: float
    cells: tuple[Cell, ...]

    def rate(self, mode: str, piece_bytes: int, num_threads: int) -> float | None:
        """Return bytes/s of a combination; None where it was not measured."""
        wanted = (mode, piece_bytes, num_threads)
        for cell in self.cells:
            if (cell.mode, cell.piece_bytes, cell.num_threads) == wanted:
                return cell.bytes_per_s
        return None


def measure(
    directory: Path, progress: Progress = lambda done, total: None, cell_s: float = _CELL_S
) -> Bandwidth | None:
    """Measure in an existing directory; None where too little is free to tell anything.

    Args:
        cell_s: seconds of each of the 36 measurements.

    Raises:
        OSError: a transfer failed.
    """
    largest = max(PIECES_BYTES)
    room_bytes = min(MAX_FILE_BYTES, read_free_bytes(directory) // _FREE_SHARE)
    file_bytes = room_bytes // largest * largest
    if file_bytes == 0:
        return None
    deadline = time.perf_counter() + _TOTAL_S
    combinations = list(itertools.product(MODES, PIECES_BYTES, THREADS))
    with temporary_files(directory, 2, file_bytes, lambda text: None) as (source, target):
        trial = _Trial(source, target, file_bytes)
        first_write = trial.fill()
        cells: list[Cell] = []
        for mode, piece_bytes, num_threads in combinations:
            progress(len(cells), len(combinations))
            if time.perf_counter() + cell_s > deadline or piece_bytes > trial.file_bytes:
                continue
            rate = trial.run(mode, piece_bytes, num_threads, cell_s)
            cells.append(Cell(mode, piece_bytes, num_threads, rate))
        progress(len(combinations), len(combinations))
        return Bandwidth(trial.file_bytes, first_write, tuple(cells))


class _Trial:
    """Two files, and the buffers of the threads that move their pieces."""

    def __init__(self, source: LiveFile, target: LiveFile, file_bytes: int) -> None:
        self.source, self.target, self.file_bytes = source, target, file_bytes
        # random: drives and filesystems that compress would seem faster than they are
        noise = os.urandom(max(PIECES_BYTES))
        self.buffers = [_buffer(noise) for _ in range(max(THREADS))]

    def fill(self) -> float:
        """Write both files once, as far as there is time, and keep to that; return bytes/s."""
        num_pieces = self.file_bytes // PIECE_BYTES
        counts, elapsed_s = [], 0.0
        for file in (self.source, self.target):
            write = self._move(file.write, PIECE_BYTES)
            count, seconds = self._race(write, PIECE_BYTES, 4, _FILL_S, num_pieces)
            counts.append(count)
            elapsed_s += seconds
        self.file_bytes = min(counts) * PIECE_BYTES
        return sum(counts) * PIECE_BYTES / elapsed_s

    def run(self, mode: str, piece_bytes: int, num_threads: int, seconds: float) -> float:
        """Return bytes/s of one combination."""
        read = self._move(self.source.read, piece_bytes)
        write = self._move(self.target.write, piece_bytes)

        def mixed(index: int, buffer: memoryview) -> None:
            (write if index % 2 else read)(index // 2, buffer)

        move = {"read": read, "write": write, "mixed": mixed}[mode]
        count, elapsed_s = self._race(move, piece_bytes, num_threads, seconds)
        return count * piece_bytes / elapsed_s

    def _move(self, transfer: Callable[[int, memoryview], None], piece_bytes: int) -> _Move:
        num_pieces = self.file_bytes // piece_bytes
        return lambda index, buffer: transfer(index % num_pieces * piece_bytes, buffer)

    def _race(
        self,
        move: _Move,
        piece_bytes: int,
        num_threads: int,
        seconds: float,
        num_pieces: int | None = None,
    ) -> tuple[int, float]:
        """Move pieces 0, 1, 2, ... for so long, or so many; return their number and seconds."""
        indices: Iterator[int]
        indices = itertools.count() if num_pieces is None else iter(range(num_pieces))
        start = time.perf_counter()

        def work(buffer: memoryview) -> int:
            count = 0
            for index in indices:
                move(index, buffer[:piece_bytes])
                count += 1
                if time.perf_counter() > start + seconds:
                    break
            return count

        with ThreadPoolExecutor(num_threads) as pool:
            count = sum(pool.map(work, self.buffers[:num_threads]))
        return count, time.perf_counter() - start


def _buffer(data: bytes) -> memoryview:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = memoryview(mmap.mmap(-1, len(data), flags=flags))
    buffer[:] = data
    return buffer
