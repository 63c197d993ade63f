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

from optstream.cli.parser import (
    budget,
    bytes_per_s,
    given_path,
    non_empty,
    number_above,
    size,
    whole_number,
    window_size,
)
from optstream.cli.plan_text import facts, sentence, text
from optstream.training.config import CODECS, DTYPES

SUMMARY = "say what a model's state would cost on a drive, in memory and in time"
OPTIMIZERS = ("muon", "adamw", "sgd")
DEVICES = ("cuda", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "model",
        type=non_empty,
        metavar="MODEL",
        help='parameters ("7B"), a config.json, or a model\'s directory',
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
        "--codec",
        choices=CODECS,
        default="exact",
        help="how state is stored, docs/codecs.md (default: exact)",
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
        "--ranks",
        type=whole_number(1, 8192),
        default=1,
        metavar="N",
        help="replicas that share the state, each keeps whole parameters (default: 1)",
    )
    group.add_argument(
        "--ranks-per-node",
        type=whole_number(1, 8192),
        metavar="N",
        help="ranks that share a node's drives and memory (default: all)",
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

    from optstream.estimate.estimate import Estimate
    from optstream.estimate.models import read_model
    from optstream.estimate.node import Node, read_node
    from optstream.estimate.optimizers import make_optimizer
    from optstream.estimate.planning import describe_all, make_plans
    from optstream.ram import parse_budget

    if args.ranks_per_node is not None and args.ranks_per_node > args.ranks:
        args.parser.error(
            f"--ranks-per-node {args.ranks_per_node} is more than --ranks {args.ranks}; give both"
        )
    if args.endurance is not None and args.step_time is None:
        args.parser.error("--endurance without --step-time tells nothing; give both")
    node = read_node(args.doctor) if args.doctor else Node()
    node = node.given(bytes_per_s=args.bandwidth, space_bytes=args.space, memory_bytes=args.memory)
    with _quiet():
        model = read_model(args.model, getattr(torch, args.dtype))
        optimizer = make_optimizer(args.optimizer, model.module)
        specs = describe_all(model.module, optimizer, args.device, args.codec)
        ram = parse_budget(args.ram)
        plans = make_plans(specs, optimizer, args.window_bytes, ram, args.ranks)
        on_node = args.ranks_per_node or args.ranks
        estimate = Estimate(plans, node, on_node, ram, args.step_time, args.endurance)
        if args.json:
            shown = json.dumps(facts(args, model, estimate), indent=1)
        else:
            shown = text(args, model, estimate)
    sys.stdout.write(shown + "\n")
    wrong = [sentence(check) for check in estimate.checks if not check.fits]
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
