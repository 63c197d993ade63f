"""What the kernel may answer to any read or write: in part, not now, never."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from optstream.errors import (
    OutOfSpaceError,
    StoreError,
    WindowIOError,
    WindowReadError,
    WindowWriteError,
)
from optstream.store import WindowFile
from optstream.store.base import Store

Pages = Callable[..., memoryview]
Windows = Callable[..., list[WindowFile]]
Opened = Callable[..., Store]
Answer = Callable[[Callable[..., int], int, memoryview, int], int]


@dataclass
class Kernel:
    """Stands before os.preadv and os.pwritev; `answers` maps a call's number to what it does."""

    answers: dict[int, Answer] = field(default_factory=dict)
    always: Answer | None = None
    num_calls: int = 0

    def call(self, real: Callable[..., int], fd: int, buffers: list[memoryview], at: int) -> int:
        (buffer,) = buffers
        # what O_DIRECT demands of the largest sectors, also where this drive would take less
        assert at % 4096 == len(buffer) % 4096 == 0, (at, len(buffer))
        answer = self.answers.get(self.num_calls, self.always)
        self.num_calls += 1
        return real(fd, [buffer], at) if answer is None else answer(real, fd, buffer, at)


def fail(number: int) -> Answer:
    def answer(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
        raise OSError(number, os.strerror(number))

    return answer


def interrupt(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
    raise KeyboardInterrupt


def short(num_bytes: int) -> Answer:
    """Transfer whole pages only, but claim `num_bytes`."""

    def answer(real: Callable[..., int], fd: int, buffer: memoryview, at: int) -> int:
        if num_bytes >= len(buffer):
            return real(fd, [buffer], at)
        real(fd, [buffer[: num_bytes // 4096 * 4096]], at)
        return num_bytes

    return answer


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, buffers, at, real=real: kernel.call(real, fd, buffers, at)
        )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return kernel


@pytest.fixture
def store(drive_path: Path, opened: Opened, windows: Windows, kernel: Kernel) -> Store:
    store = opened("direct", drive_path)
    store.reserve(windows(8, 8))
    kernel.num_calls = 0
    return store


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF])
@pytest.mark.parametrize("call", [0, 1])
def test_a_refused_transfer_names_everything(
    store: Store, kernel: Kernel, pages: Pages, number: int, call: int, drive_path: Path
) -> None:
    for use, error, verb in (
        (store.read, WindowReadError, "read"),
        (store.write, WindowWriteError, "write"),
    ):
        kernel.num_calls = 0
        kernel.answers = {0: short(8192), call: fail(number)}
        buffer = pages(4, fill=1)
        with pytest.raises(error) as caught:
            use(1, 4096, buffer)
        fault = caught.value
        offset, num_bytes = (8192, 16384) if call == 0 else (16384, 8192)
        assert (fault.errno, fault.offset, fault.num_bytes) == (number, offset, num_bytes)
        assert fault.filename == f"{drive_path} (nameless file of window 1)"
        assert str(fault).startswith(
            f"cannot {verb} {num_bytes} bytes at offset {offset} of {fault.filename}: "
            f"{os.strerror(number)} (errno {number}); "
        )
        assert kernel.num_calls == call + 1
        if verb == "write":
            assert buffer == pages(4, fill=1)
        kernel.answers = {}
        use(1, 4096, buffer)  # the store goes on


@pytest.mark.parametrize("num_bytes", [4096, 8192, 5000, 512, 12288 + 100])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_short_transfers_are_completed(
    store: Store, kernel: Kernel, pages: Pages, num_bytes: int, direction: str
) -> None:
    wanted, found = pages(8, fill=1), pages(8, fill=99)
    answers = {call: short(num_bytes) for call in range(6)}
    kernel.answers = answers if direction == "write" else {}
    store.write(0, 0, wanted)
    kernel.num_calls, kernel.answers = 0, answers if direction == "read" else {}
    store.read(0, 0, found)
    assert found == wanted


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("num_failures", [1, 5])
def test_what_passes_is_tried_again(
    store: Store, kernel: Kernel, pages: Pages, number: int, num_failures: int
) -> None:
    answers: dict[int, Answer] = {0: short(4096)}
    answers |= dict.fromkeys(range(1, 1 + num_failures), fail(number))
    wanted, found = pages(8, fill=1), pages(8, fill=99)
    for use, buffer in ((store.write, wanted), (store.read, found)):
        kernel.num_calls, kernel.answers = 0, dict(answers)
        use(0, 0, buffer)
        assert kernel.num_calls > num_failures
    assert found == wanted


def test_progress_allows_more_retries(store: Store, kernel: Kernel, pages: Pages) -> None:
    kernel.answers = {n: short(4096) if n % 4 == 3 else fail(errno.EAGAIN) for n in range(24)}
    store.write(0, 0, pages(8))
    assert kernel.num_calls == 25


@pytest.mark.parametrize(
    ("answer", "number", "cause", "num_calls"),
    [
        (fail(errno.EAGAIN), errno.EAGAIN, "Resource temporarily unavailable", 10),
        (short(512), errno.EIO, "the kernel stopped after 512 bytes", 10),
        (short(0), errno.EIO, "the kernel stopped after 0 bytes; was the file truncated", 1),
    ],
)
def test_what_never_passes_is_an_error(
    store: Store,
    kernel: Kernel,
    pages: Pages,
    answer: Answer,
    number: int,
    cause: str,
    num_calls: int,
) -> None:
    kernel.always = answer
    for use in (store.read, store.write):
        kernel.num_calls = 0
        with pytest.raises(WindowIOError, match=cause) as caught:
            use(0, 0, pages(2))
        assert caught.value.errno == number
        assert kernel.num_calls == num_calls


def test_a_truncated_file(
    store: Store, pages: Pages, open_files: Callable[[Path], list[str]], drive_path: Path
) -> None:
    for fd in Path("/proc/self/fd").iterdir():
        if str(fd.resolve()).startswith(str(drive_path)):
            os.ftruncate(int(fd.name), 4096 + 8192)
    with pytest.raises(WindowReadError, match=r"16384 bytes at offset 12288 .*truncated"):
        store.read(0, 0, pages(6))


def test_a_signal_handler_that_raises_loses_nothing(
    store: Store, kernel: Kernel, pages: Pages
) -> None:
    store.write(0, 0, pages(8, fill=1))
    kernel.answers, kernel.num_calls = {0: short(4096), 1: interrupt}, 0
    with pytest.raises(KeyboardInterrupt):
        store.write(0, 0, pages(8, fill=2))
    kernel.answers, found = {}, pages(8)
    store.read(0, 0, found)
    assert bytes(found) == bytes(pages(1, fill=2)) + bytes(pages(7, fill=2))
    store.write(0, 0, pages(8, fill=2))
    store.read(0, 0, found)
    assert found == pages(8, fill=2)


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (fail(errno.EIO), WindowWriteError),
        (fail(errno.ENOSPC), OutOfSpaceError),
        (interrupt, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("names", [False, True])
def test_a_header_that_cannot_be_written(
    call: int,
    answer: Answer,
    error: type[BaseException],
    names: bool,
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    kernel: Kernel,
    refuse: Callable[[int, int], None],
    open_files: Callable[[Path], list[str]],
) -> None:
    if names:
        refuse(os.O_TMPFILE, errno.EOPNOTSUPP)
    kernel.answers = {call: answer}
    store = opened("direct", drive_path / "state")
    with pytest.raises(error):
        store.reserve(windows(1, 1, 1))
    assert list(drive_path.iterdir()) == []
    assert open_files(drive_path) == []
    kernel.answers = {}
    store.reserve(windows(1, 1, 1))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EFBIG, StoreError),
        (errno.EIO, StoreError),
    ],
)
def test_a_reserve_that_fails_part_way(
    number: int,
    kind: type[StoreError],
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    open_files: Callable[[Path], list[str]],
) -> None:
    store = opened("direct", drive_path)
    store.reserve(windows(2))
    left = iter([0, 0, number])

    def fallocate(fd: int, num_bytes: int) -> None:
        if error := next(left):
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr("optstream.store.linux.fallocate", fallocate)
    with pytest.raises(kind) as caught:
        store.reserve(windows(511, 511, 511))
    assert caught.value.errno == number
    for part in ("state needs 6.0 MiB in ", str(drive_path), "iB free", os.strerror(number)):
        assert part in str(caught.value)
    assert len(open_files(drive_path)) == 1
    store.read(0, 0, pages(2))


def test_zeros_are_written_where_nothing_can_be_reserved(
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fallocate(fd: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr("optstream.store.linux.fallocate", fallocate)
    opened("direct", drive_path).reserve(windows(2048 + 3, 1))
    sizes = sorted(
        os.fstat(int(fd.name)).st_blocks * 512
        for fd in Path("/proc/self/fd").iterdir()
        if str(fd.resolve()).startswith(str(drive_path))
    )
    assert sizes == [2 * 4096, 2052 * 4096]
    (record,) = caplog.records
    assert f"{drive_path}: its filesystem cannot reserve space" in record.getMessage()


def test_direct_transfers_refused_only_at_the_first(
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    pages: Pages,
    kernel: Kernel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel.answers = {0: fail(errno.EINVAL)}
    store = opened("direct", drive_path)
    store.reserve(windows(2, 2))
    (record,) = caplog.records
    assert f"{drive_path}: the filesystem refuses O_DIRECT" in record.getMessage()
    for fd in Path("/proc/self/fd").iterdir():
        if str(fd.resolve()).startswith(str(drive_path)):
            assert not os.O_DIRECT & int(
                Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0], 8
            )
    store.write(0, 0, pages(2, fill=4))
    found = pages(2)
    store.read(0, 0, found)
    assert found == pages(2, fill=4)


def test_a_failed_write_back_is_a_failed_write(
    drive_path: Path,
    opened: Opened,
    windows: Windows,
    pages: Pages,
    refuse: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(os.O_DIRECT, errno.EINVAL)
    store = opened("direct", drive_path)
    store.reserve(windows(2))

    def fdatasync(fd: int) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(WindowWriteError, match=r"8192 bytes at offset 4096 .*No space left"):
        store.write(0, 0, pages(2))
