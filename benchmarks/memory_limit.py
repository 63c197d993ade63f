"""Training under a memory limit: who survives it, and how fast.

    python benchmarks/memory_limit.py DIR                      # both parts, 4 GiB of state
    python benchmarks/memory_limit.py DIR --only survival --state 256MiB --window 2MiB --json
    python benchmarks/memory_limit.py DIR --only survival --limit-by rlimit
    python benchmarks/memory_limit.py DIR --only speed --rounds 5
    python benchmarks/memory_limit.py DIR --only speed --dirty-ratio 80     # as root

survival    the same training (AdamW, fused) in memory without a limit, and with a limit that leaves
            half of its state: in memory, `direct`, `mapped`. Losses must be equal to the last bit.
speed       steps of contestants that take turns, a process and a cgroup each; ratios of medians.
            `forward` is the mapped store with a scan that never goes backwards.

The kernel slows who keeps more than a fifth of memory waiting to be written; --dirty-ratio lets
that be more during the race of `mapped` without a shortage of memory.

A limit leaves a process so much more than it uses with model and gradients: on an accelerator those
would not be in host memory.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from limited import Contestant, DiedError, state_bytes
from memory_group import MemoryGroup, NoGroupError

from optstream.units import format_bytes, parse_bytes

GIB = 2**30
ROOM_BYTES = 64 * 2**20
"""For what is neither state nor buffers: code that the first step loads, the allocator."""
WINDOW = "256MiB"
"""The default of `offload`, for where memory is not short."""


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        ended: "finished", or what ended it.
        anon_bytes: its most anonymous memory above model and gradients.
        bound_bytes: what the plan promises; None for the plain optimizer.
        cache_bytes: page cache charged to its cgroup in the end, above that before the first step.
        limit_bytes: what it was left above model and gradients; None without a limit.
    """

    kind: str
    ended: str
    losses: list[float]
    anon_bytes: int
    bound_bytes: int | None
    cache_bytes: int | None
    limit_bytes: int | None


@contextmanager
def started(
    args: argparse.Namespace, kind: str, limit_bytes: int | None, **more: object
) -> Iterator[Contestant]:
    """Start a contestant under its limit; `more` are options of offload."""
    grouped = limit_bytes is not None and args.limit_by == "cgroup"
    options = {"num_layers": args.num_layers, "width": args.width, "threads": args.threads}
    options |= {"train": False, **more}
    if kind != "plain":
        options.setdefault("window", args.window)
    contestant = Contestant(kind, args.directory, MemoryGroup() if grouped else None, **options)
    try:
        if limit_bytes is not None:
            contestant.limit(limit_bytes, by_cgroup=grouped)
        yield contestant
    finally:
        contestant.end()


def survive(args: argparse.Namespace, kind: str, limit_bytes: int | None) -> Outcome:
    losses: list[float] = []
    ended, anon_bytes, bound_bytes, cache_bytes = "finished", 0, None, None
    with started(args, kind, limit_bytes, train=True) as contestant:
        before = contestant.group.read() if contestant.group else None
        try:
            for _ in range(args.steps):
                step = contestant.step()
                losses.append(step["loss"])
                anon_bytes = max(anon_bytes, step["peak_anon_bytes"])
                bound_bytes = step["bound_bytes"]
        except DiedError as error:
            killed = error.status == -signal.SIGKILL
            ended = "killed by the kernel" if killed else error.message
        if contestant.group and before:
            after = contestant.group.read()
            cache_bytes = (after.file_bytes or 0) - (before.file_bytes or 0)
        anon_bytes = max(0, anon_bytes - contestant.started["anon_bytes"])
    return Outcome(kind, ended, losses, anon_bytes, bound_bytes, cache_bytes, limit_bytes)


def survival(args: argparse.Namespace) -> list[Outcome]:
    left = args.state_bytes // 2 + ROOM_BYTES
    runs = [("plain", None), ("plain", left), ("direct", left), ("mapped", left)]
    return [survive(args, kind, limit_bytes) for kind, limit_bytes in runs]


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    print(
        "store    left by the limit  ended                       last loss  "
        "anonymous  bound      cache"
    )
    for outcome in outcomes:
        loss = f"{outcome.losses[-1]:.9f}" if outcome.losses else "-"
        sizes = (outcome.anon_bytes, outcome.bound_bytes, outcome.cache_bytes)
        print(
            f"{outcome.kind:8} {_size(outcome.limit_bytes):18} {outcome.ended:22.22} {loss:>14}  "
            + " ".join(f"{_size(size):10}" for size in sizes)
        )


def race(
    args: argparse.Namespace, limit_bytes: int, kinds: dict[str, dict[str, object]]
) -> dict[str, float]:
    """Return the median seconds of a step, by contestant; they take turns in one run."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(started(args, name.split()[0], limit_bytes, **options))
            for name, options in kinds.items()
        }
        for contestant in contestants.values():
            for _ in range(args.warm_up):
                contestant.step()
        for _ in range(args.rounds):
            for name, contestant in contestants.items():
                step = contestant.step()
                seconds[name].append(step["seconds"])
                if args.verbose:
                    print(name, step, flush=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def speed(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    half = args.state_bytes // 2 + ROOM_BYTES
    # a full RAM tier: all windows and the buffers around them
    above = args.state_bytes + args.state_bytes // 2 + 4 * parse_bytes(WINDOW) + ROOM_BYTES
    races: dict[str, tuple[int, dict[str, dict[str, object]]]] = {
        "limit at half the state": (
            half,
            {"direct": {}, "forward": {}, "direct ram=40%": {"ram": "40%"}, "mapped": {}},
        ),
        "limit above the state: page cache": (above, {"plain": {}, "mapped": {"window": WINDOW}}),
        "limit above the state: RAM tier": (
            above,
            {"plain": {}, "direct ram=100%": {"ram": "100%", "window": WINDOW}},
        ),
    }
    medians = {}
    for title, (limit_bytes, kinds) in races.items():
        with dirty_ratio(args.dirty_ratio if "mapped" in kinds and "plain" in kinds else None):
            medians[title] = race(args, limit_bytes, kinds)
    return medians


@contextmanager
def dirty_ratio(percent: int | None) -> Iterator[None]:
    """Let so much of memory wait to be written, before anybody starts or must; needs root."""
    if percent is None:
        yield
        return
    values = {"dirty_ratio": percent, "dirty_background_ratio": percent - 5}
    paths = {Path("/proc/sys/vm") / name: value for name, value in values.items()}
    before = {path: path.read_text() for path in paths}
    try:
        for path, value in paths.items():
            path.write_text(str(value))
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def print_ratios(medians: dict[str, dict[str, float]]) -> None:
    for title, race_s in medians.items():
        print(f"{title}: " + ", ".join(f"{name} {value:.2f} s" for name, value in race_s.items()))
    half, cached, tier = medians.values()
    for name, value, wanted in (
        ("forward / direct", half["forward"] / half["direct"], "at least 2"),
        ("direct / direct ram=40%", half["direct"] / half["direct ram=40%"], "at least 1.5"),
        ("mapped / plain", cached["mapped"] / cached["plain"], "at most 1.1"),
        ("direct ram=100% / plain", tier["direct ram=100%"] / tier["plain"], "at most 1.1"),
    ):
        print(f"{name}: {value:.2f} ({wanted})")


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--state", default="4GiB")
    parser.add_argument("--width", type=int, default=1024, help="of a layer")
    parser.add_argument("--window", default="64MiB")
    parser.add_argument("--steps", type=int, default=4, help="of the survival part")
    parser.add_argument(
        "--rounds", type=int, default=6, help="of the speed part; even: scans alternate"
    )
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dirty-ratio", type=int, metavar="PERCENT", help="10 to 95; sets vm.dirty_ratio meanwhile"
    )
    parser.add_argument("--only", choices=["survival", "speed"])
    parser.add_argument("--limit-by", choices=["cgroup", "rlimit"], default="cgroup")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="every step of the speed part")
    args = parser.parse_args()
    args.window_bytes = parse_bytes(args.window)
    args.num_layers = max(1, parse_bytes(args.state) // state_bytes(args.width))
    args.state_bytes = args.num_layers * state_bytes(args.width)
    return args


def main() -> None:
    args = parse()
    try:
        if args.only != "speed":
            outcomes = survival(args)
            if args.json:
                print(json.dumps([asdict(outcome) for outcome in outcomes]))
            else:
                print_outcomes(outcomes)
        if args.only != "survival":
            medians = speed(args)
            if args.json:
                print(json.dumps(medians))
            else:
                print_ratios(medians)
    except NoGroupError as error:
        print(f"skipped: {error}")


if __name__ == "__main__":
    main()
