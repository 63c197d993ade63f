"""Say what streaming would cost a model: bytes on the drive, in memory, a step and a day.

Pure arithmetic, by the code that plans inside `offload`; nothing is made, and the model need not be
there. MODEL is a number of parameters ("7B", "30.5e9"), for which the shapes of a usual decoder are
assumed, or a transformers config.json, or the directory of a model that has one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optstream.cli.parser import budget, bytes_per_s, given_path, number_above, size, window_size
from optstream.cli.table import align
from optstream.training.config import DTYPES
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.estimate.estimate import Check, Estimate
    from optstream.estimate.models import ModelShape

SUMMARY = "say what a model's state would cost on a drive, in memory and in time"
OPTIMIZERS = ("muon", "adamw", "sgd")
DEVICES = ("cuda", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help='parameters ("7B"), a config.json, or a model\'s directory'
    )
    _add_training_arguments(parser.add_argument_group("what is trained"))
    _add_node_arguments(parser.add_argument_group("on what"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="muon",
        help="muon: Muon on matrices, AdamW on the rest (default: muon)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of the parameters; bfloat16 keeps float32 masters in the state (default: bfloat16)",
    )
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="cuda",
        help="where the parameters are and the update runs (default: cuda)",
    )
    group.add_argument(
        "--window",
        dest="window_bytes",
        type=window_size,
        default=256 * 2**20,
        metavar="SIZE",
        help="state in memory together (default: 256MiB)",
    )
    group.add_argument(
        "--ram",
        type=budget,
        default="0",
        metavar="SIZE|PERCENT",
        help='state that stays in memory between steps, "8GiB" or "25%%" of it (default: 0)',
    )
    group.add_argument(
        "--step-time",
        type=number_above(0),
        metavar="SECONDS",
        help="of a whole step; tells what is written in a day",
    )


def _add_node_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--doctor",
        type=given_path,
        metavar="FILE",
        help="what optstream doctor --json DIR found on the node; the next three replace its parts",
    )
    group.add_argument(
        "--bandwidth",
        type=bytes_per_s,
        metavar="RATE",
        help='of its drives together, reads and writes at once, for example "2.5GB/s"',
    )
    group.add_argument("--space", type=size, metavar="SIZE", help="free on its drives")
    group.add_argument("--memory", type=size, metavar="SIZE", help="that training may still use")
    group.add_argument(
        "--endurance",
        type=size,
        metavar="SIZE",
        help='that may be written to its drives in their life, as they are rated: "1.2PB"',
    )


def run(args: argparse.Namespace) -> int:
    """Plan, print, and return the exit code: 1 if something does not fit."""
    import torch

    from optstream.estimate.estimate import Estimate, describe_all, make_plan
    from optstream.estimate.models import read_model
    from optstream.estimate.node import Node, read_node
    from optstream.estimate.optimizers import make_optimizer
    from optstream.ram import parse_budget

    node = read_node(args.doctor) if args.doctor else Node()
    node = node.given(bytes_per_s=args.bandwidth, space_bytes=args.space, memory_bytes=args.memory)
    with _quiet():
        model = read_model(args.model, getattr(torch, args.dtype))
        optimizer = make_optimizer(args.optimizer, model.module)
        specs = describe_all(model.module, optimizer, args.device)
        ram = parse_budget(args.ram)
        plan = make_plan(specs, args.window_bytes, ram)
        estimate = Estimate(plan, node, 1, ram, args.step_time, args.endurance)
        checks = estimate.checks
    facts = _facts(args, model, estimate)
    text = json.dumps(facts, indent=1) if args.json else _text(args, model, estimate)
    sys.stdout.write(text + "\n")
    wrong = [_sentence(check) for check in checks if not check.fits]
    if wrong:
        sys.stderr.write(f"optstream: {'; '.join(wrong)}\n")
    return 1 if wrong else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the plan's warnings of large windows to what is printed here."""
    log = logging.getLogger("optstream")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _facts(args: argparse.Namespace, model: ModelShape, estimate: Estimate) -> dict[str, Any]:
    plan = estimate.plan
    return {
        "model": model.text,
        "num_params": model.num_params,
        "optimizer": args.optimizer,
        "dtype": args.dtype,
        "device": args.device,
        "window_bytes": args.window_bytes,
        "weights_bytes": model.num_bytes,
        "rank": {
            "num_windows": plan.num_windows,
            "largest_window_bytes": plan.largest_bytes,
            "resident_bytes": plan.resident_bytes,
            "state_bytes": plan.state_bytes,
            "drive_bytes": estimate.drive_bytes,
            "peak_host_bytes": plan.peak_host_bytes,
            "peak_device_bytes": plan.peak_device_bytes,
            "read_bytes_per_step": plan.read_bytes_per_step,
            "written_bytes_per_step": plan.written_bytes_per_step,
        },
        "node": asdict(estimate.node),
        "drive_s_per_step": estimate.drive_s,
        "written_bytes_per_day": estimate.written_bytes_per_day,
        "endurance_days": estimate.endurance_days,
        "checks": [{**asdict(check), "fits": check.fits} for check in estimate.checks],
    }


def _text(args: argparse.Namespace, model: ModelShape, estimate: Estimate) -> str:
    from optstream.estimate.optimizers import RECIPES

    rows = [
        ("model", f"{model.num_params:,} parameters in {args.dtype}: {model.text}"),
        ("optimizer", RECIPES[args.optimizer].code),
        ("weights", f"{format_bytes(model.num_bytes)}, gradients as much; not counted below"),
        *_rank_rows(args, model, estimate),
        *_time_rows(estimate),
        *(
            ("fits" if check.fits else "does not fit", _sentence(check))
            for check in estimate.checks
        ),
        ("use", _use(args, estimate)),
    ]
    return align(rows)


def _rank_rows(
    args: argparse.Namespace, model: ModelShape, estimate: Estimate
) -> Iterator[tuple[str, str]]:
    plan = estimate.plan
    per_param = plan.state_bytes / model.num_params
    yield "state", f"{format_bytes(plan.state_bytes)}, {per_param:.2f} bytes a parameter"
    large = f", the largest {format_bytes(plan.largest_bytes)}"
    yield (
        "drive",
        f"{format_bytes(estimate.drive_bytes)} in {plan.num_windows} windows"
        f"{large if plan.largest_bytes > args.window_bytes else ''}; as much again for each "
        "checkpoint that is kept",
    )
    kept = f", {format_bytes(plan.resident_bytes)} of it state that stays"
    yield (
        "host",
        f"at most {format_bytes(plan.peak_host_bytes)}{kept if plan.num_resident else ''}",
    )
    if args.device != "cpu":
        yield "device", f"at most {format_bytes(plan.peak_device_bytes)}"
    yield (
        "a step",
        f"reads {format_bytes(plan.read_bytes_per_step)}, writes "
        f"{format_bytes(plan.written_bytes_per_step)}",
    )


def _time_rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    if estimate.drive_s is not None and estimate.node.bytes_per_s is not None:
        rate = f"{estimate.node.bytes_per_s / 1e9:.2f} GB/s"
        yield "", f"adds at most {estimate.drive_s:.2f} s at {rate}, less what the update hides"
    if estimate.written_bytes_per_day is not None:
        yield "a day", f"writes {format_bytes(estimate.written_bytes_per_day)}"
    if estimate.endurance_days is not None:
        yield "", f"the drives are rated for {estimate.endurance_days:,.0f} days of that"


def _sentence(check: Check) -> str:
    if check.what.startswith("open files"):
        needed, available = str(check.needed), str(check.available)
    else:
        needed, available = format_bytes(check.needed), format_bytes(check.available)
    advice = f"; {check.advice}" if check.advice else ""
    return f"{check.what} needs {needed}, has {available}{advice}"


def _use(args: argparse.Namespace, estimate: Estimate) -> str:
    directories = [json.dumps(path) for path in estimate.node.directories]
    where = f"[{', '.join(directories)}]" if len(directories) > 1 else "".join(directories) or "DIR"
    threads = estimate.node.io_threads
    ram = f', ram="{args.ram}"' if estimate.plan.num_resident else ""
    return (
        f'optstream.offload(optimizer, {where}, model=model, window="{_size(args.window_bytes)}"'
        + ram
        + (f", io_threads={threads})" if threads else ")")
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB" if num_bytes % 2**20 == 0 else str(num_bytes)
