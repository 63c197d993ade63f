"""What `optstream plan` shows, as an object and as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optstream.cli.table import align
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.estimate.estimate import Check, Estimate
    from optstream.estimate.models import ModelShape
    from optstream.plan import Plan


def facts(args: argparse.Namespace, model: ModelShape, estimate: Estimate) -> dict[str, Any]:
    """Return everything as JSON holds it; sizes in bytes, times in seconds."""
    ranks = [_rank_facts(plan) for plan in estimate.plans]
    return {
        "model": model.text,
        "num_params": model.num_params,
        "optimizer": args.optimizer,
        "dtype": args.dtype,
        "device": args.device,
        "codec": args.codec,
        "window_bytes": args.window_bytes,
        "weights_bytes": model.num_bytes,
        "ranks": ranks,
        "most_of_a_rank": {name: max(rank[name] for rank in ranks) for name in ranks[0]},
        "ranks_per_node": estimate.ranks_per_node,
        "node": asdict(estimate.node),
        "drive_s_per_step": estimate.drive_s,
        "written_bytes_per_day": estimate.written_bytes_per_day,
        "endurance_days": estimate.endurance_days,
        "checks": [{**asdict(check), "fits": check.fits} for check in estimate.checks],
    }


def _rank_facts(plan: Plan) -> dict[str, int]:
    from optstream.estimate.estimate import drive_bytes

    return {
        "num_windows": plan.num_windows,
        "largest_window_bytes": plan.largest_bytes,
        "resident_bytes": plan.resident_bytes,
        "state_bytes": plan.state_bytes,
        "drive_bytes": drive_bytes(plan),
        "peak_host_bytes": plan.peak_host_bytes,
        "peak_device_bytes": plan.peak_device_bytes,
        "read_bytes_per_step": plan.read_bytes_per_step,
        "written_bytes_per_step": plan.written_bytes_per_step,
    }


def text(args: argparse.Namespace, model: ModelShape, estimate: Estimate) -> str:
    """Return two columns: what, and how much."""
    from optstream.estimate.optimizers import RECIPES

    state_bytes = sum(plan.state_bytes for plan in estimate.plans)
    rows = [
        ("model", f"{model.num_params:,} parameters in {args.dtype}: {model.text}"),
        ("optimizer", RECIPES[args.optimizer].code),
        ("weights", f"{format_bytes(model.num_bytes)}, gradients as much; not counted below"),
        (
            "state",
            f"{format_bytes(state_bytes)}, {state_bytes / model.num_params:.2f} bytes a parameter",
        ),
        *_rank_rows(args, estimate),
        *_time_rows(estimate),
        *(("fits" if check.fits else "does not fit", sentence(check)) for check in estimate.checks),
        ("use", _use(args, estimate)),
        *_ram_rows(args, model, estimate),
    ]
    return align(rows)


def _rank_rows(args: argparse.Namespace, estimate: Estimate) -> Iterator[tuple[str, str]]:
    ranks = [_rank_facts(plan) for plan in estimate.plans]
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    num_windows, largest = most["num_windows"], most["largest_window_bytes"]
    size = {name: format_bytes(value) for name, value in most.items()}
    if len(ranks) > 1:
        node = f"{estimate.ranks_per_node} on a node; the figures below are the most of any of them"
        yield "ranks", f"{len(ranks)}, {node}"
    yield (
        "drive",
        f"{size['drive_bytes']} in {num_windows} windows"
        f"{f', the largest {format_bytes(largest)}' if largest > args.window_bytes else ''}; "
        "as much again for each checkpoint that is kept",
    )
    kept = f", {size['resident_bytes']} of it state that stays" if most["resident_bytes"] else ""
    yield "host", f"at most {size['peak_host_bytes']}{kept}"
    if args.device != "cpu":
        yield "device", f"at most {size['peak_device_bytes']}"
    yield (
        "a step",
        f"reads {size['read_bytes_per_step']}, writes {size['written_bytes_per_step']}",
    )


def _time_rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    if estimate.drive_s is not None and estimate.node.bytes_per_s is not None:
        rate = f"{estimate.node.bytes_per_s / 1e9:.2f} GB/s"
        moved = format_bytes(estimate.moved_bytes_per_step)
        yield (
            "",
            f"adds at most {estimate.drive_s:.2f} s: a node moves {moved} at {rate}; the update "
            "hides part of that",
        )
    if estimate.written_bytes_per_day is not None:
        yield "a day", f"writes {format_bytes(estimate.written_bytes_per_day)} to a node's drives"
    if estimate.endurance_days is not None:
        yield "", f"they are rated for {estimate.endurance_days:,.0f} days of that"


def _ram_rows(
    args: argparse.Namespace, model: ModelShape, estimate: Estimate
) -> Iterator[tuple[str, str]]:
    """Yield what memory that is left could do, where `--ram` did not ask for any."""
    model_bytes = 2 * model.num_bytes if args.device == "cpu" else 0
    spare_gib = estimate.spare_bytes(model_bytes) >> 30
    if spare_gib == 0 or any(plan.num_resident for plan in estimate.plans):
        return
    other = estimate.with_ram(spare_gib << 30)
    saved = estimate.moved_bytes_per_step - other.moved_bytes_per_step
    if saved > 0:
        share = saved / estimate.moved_bytes_per_step
        yield "", f'ram="{spare_gib}GiB" would spare {share:.0%} of what a step moves'


def sentence(check: Check) -> str:
    """Return what is needed, what is there, and what to do if that is too little."""
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
    codec = f', codec="{args.codec}"' if args.codec != "exact" else ""
    group = ", process_group=dist.group.WORLD" if args.ranks > 1 else ""
    ram = f', ram="{args.ram}"' if any(plan.num_resident for plan in estimate.plans) else ""
    return (
        f'optstream.offload(optimizer, {where}, model=model, window="{_size(args.window_bytes)}"'
        + codec
        + ram
        + group
        + (f", io_threads={threads})" if threads else ")")
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20}MiB" if num_bytes % 2**20 == 0 else str(num_bytes)
