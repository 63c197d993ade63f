"""Train a language model on text, its optimizer's state streamed from a drive."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optstream.cli.parser import (
    given_path,
    non_empty,
    number_above,
    ram_budget,
    whole_number,
    window_size,
)
from optstream.training.config import (
    CODECS,
    DTYPES,
    OPTIMIZERS,
    STORES,
    STORES_ON_DRIVE,
    TrainConfig,
)
from optstream.training.packages import require_modules
from optstream.training.stop import Stopped, StopRequest
from optstream.units import format_bytes

if TYPE_CHECKING:
    from optstream.training.result import RunResult

SUMMARY = "train a language model on text, its optimizer's state on the drive"
STATE_DIR_VARIABLE = "OPTSTREAM_STATE_DIR"
_DEFAULT_STATE_DIR = "optstream-state"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags; each default is the one of TrainConfig."""
    _add_model_arguments(parser.add_argument_group("what is trained"))
    _add_state_arguments(parser.add_argument_group("where the optimizer's state lives"))
    _add_run_arguments(parser.add_argument_group("how it is trained"))
    _add_checkpoint_arguments(parser.add_argument_group("what is kept"))
    _add_output_arguments(parser.add_argument_group("what is shown"))


def run(args: argparse.Namespace) -> int:
    """Train, print the table, and return the exit code."""
    config = _config(args)
    require_modules(("rich",), extra="train", what="optstream train")
    configs = [config, comparison(config)] if args.compare else [config]
    with StopRequest() as stop:
        # with torch and transformers, which take seconds
        from optstream.training.progress import make_observer
        from optstream.training.ranks import open_ranks
        from optstream.training.run import train
        from optstream.training.summary import print_summary

        results: list[list[RunResult]] = []
        with open_ranks() as ranks:
            for each in configs:
                observer = make_observer(quiet=args.quiet or ranks.rank > 0)
                try:
                    results.append(ranks.gather(train(each, stop, observer, ranks)))
                except Stopped:
                    if not results:
                        raise
                if stop.signum is not None:
                    break
            if ranks.rank == 0:
                print_summary(results)
    return 0 if stop.signum is None else 128 + stop.signum


def comparison(config: TrainConfig) -> TrainConfig:
    """Return the run with AdamW that a run is compared with."""
    return replace(
        config,
        optimizer="adamw",
        lr=config.adamw_lr,
        adamw_lr=None,
        save_dir=None,
        save_every=None,
        keep=None,
    )


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--text",
        nargs="+",
        type=given_path,
        metavar="FILE",
        help="UTF-8 files, or folders of *.md and *.txt (default: 38 plays, from a package)",
    )
    group.add_argument(
        "--model",
        type=non_empty,
        metavar="tiny|small|smollm2|DIR",
        help="tiny (1 M parameters), small (12 M), smollm2 (135 M, pretrained), or the directory "
        "of a transformers causal language model with its tokenizer" + _default("model"),
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the parameters; bfloat16 keeps float32 masters in the optimizer's state"
        + _default("dtype"),
    )


def _add_state_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store",
        choices=STORES,
        help="direct: files on a drive; mapped: the same, in reclaimable page cache; memory: the "
        "same, in memory; none: the plain optimizer" + _default("store"),
    )
    group.add_argument(
        "--state-dir",
        type=given_path,
        metavar="DIR",
        help=f"on a drive; made for you alone if missing, left empty at the end (default: "
        f"${STATE_DIR_VARIABLE}, or ./{_DEFAULT_STATE_DIR})",
    )
    group.add_argument(
        "--window",
        dest="window_bytes",
        type=window_size,
        metavar="SIZE",
        help="state in memory together, for example 64MiB (default: "
        f"{format_bytes(TrainConfig.window_bytes)})",
    )
    group.add_argument(
        "--ram",
        type=ram_budget,
        metavar="SIZE|PERCENT|auto",
        help="state that stays in memory between steps, beside the windows: 8GiB, 25%% of the "
        "state, or auto for what can be spared" + _default("ram"),
    )
    group.add_argument(
        "--codec",
        choices=CODECS,
        help="how the state is stored: split needs fewer bytes for masters of bfloat16 and is as "
        "exact; the others round moments, too (docs/codecs.md)" + _default("codec"),
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="muon: Muon on matrices, AdamW on the rest" + _default("optimizer"),
    )
    group.add_argument(
        "--lr",
        type=number_above(0),
        help="peak learning rate (default: one that suits the optimizer and the model)",
    )
    group.add_argument(
        "--adamw-lr",
        type=number_above(0),
        metavar="LR",
        help="of what Muon leaves to AdamW, and of the run that --compare adds (default: one that "
        "suits the model)",
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="train with AdamW afterwards, for equal steps on equal batches, and show both",
    )
    group.add_argument(
        "--weight-decay",
        type=number_above(0, or_equal=True),
        metavar="W",
        help="of matrices and embeddings" + _default("weight_decay"),
    )
    for name, highest, text in (
        ("steps", 2**31, "updates of the parameters"),
        ("batch-size", 2**20, "sequences a step"),
        ("seq-len", 2**20, "tokens a sequence"),
    ):
        group.add_argument(
            f"--{name}",
            type=whole_number(1, highest),
            metavar="N",
            help=text + _default(name.replace("-", "_")),
        )
    group.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        metavar="S",
        help="fixes weights and batches" + _default("seed"),
    )


def _add_checkpoint_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save-dir",
        type=given_path,
        metavar="DIR",
        help="make checkpoints there, in step000050 and so on; the last one at the end or upon "
        "Ctrl-C (default: none are made)",
    )
    group.add_argument(
        "--save-every",
        type=whole_number(1, 2**31),
        metavar="K",
        help="steps between checkpoints (default: only the last one)",
    )
    group.add_argument(
        "--keep",
        type=whole_number(1, 2**31),
        metavar="N",
        help="leave the N newest, older ones go when a new one is safe (default: all stay)",
    )
    group.add_argument(
        "--resume",
        type=given_path,
        metavar="DIR",
        help="go on from a checkpoint, or from the newest in a --save-dir; flags that are left "
        "out are as they were",
    )


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-tokens",
        type=whole_number(1, 2**40),
        metavar="N",
        help="held-out tokens the loss is measured on" + _default("eval_tokens"),
    )
    group.add_argument(
        "--metrics",
        type=given_path,
        metavar="FILE.jsonl",
        help="append a JSON line a step to this file",
    )
    group.add_argument("--quiet", action="store_true", help="no progress, only the final table")


def _default(field: str) -> str:
    return f" (default: {getattr(TrainConfig, field)})"


def _config(args: argparse.Namespace) -> TrainConfig:
    flags = {field.name: getattr(args, field.name, None) for field in fields(TrainConfig)}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    _check_usage(args)
    if args.resume is not None:
        from optstream.training.checkpoint import find_checkpoint

        saved = find_checkpoint(args.resume).state.settings
        given = {**saved, "text": [Path(path) for path in saved["text"]], **given}
    if given.get("store", TrainConfig.store) in STORES_ON_DRIVE:
        given.setdefault("state_dir", _default_state_dir())
    given["text"] = tuple(given.get("text", ()))
    return TrainConfig(**given)


def _check_usage(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    store = args.store or TrainConfig.store
    if store not in STORES_ON_DRIVE and args.state_dir is not None:
        args.parser.error(f"--state-dir does nothing with --store {store}; leave one of them out")
    flags = (("--window", args.window_bytes), ("--ram", args.ram), ("--codec", args.codec))
    for flag, value in flags:
        if store == "none" and value is not None:
            args.parser.error(f"{flag} does nothing with --store none; leave one of them out")
    if args.optimizer == "adamw":
        for flag, value in (("--adamw-lr", args.adamw_lr), ("--compare", args.compare)):
            if value:
                args.parser.error(f"{flag} does nothing with --optimizer adamw; leave it out")
    for flag, value in (("--save-every", args.save_every), ("--keep", args.keep)):
        if value is not None and args.save_dir is None:
            args.parser.error(f"{flag} does nothing without --save-dir; give that too")
    if args.compare and args.resume is not None:
        args.parser.error("--compare needs both runs whole; leave it out with --resume")


def _default_state_dir() -> Path:
    return Path(os.environ.get(STATE_DIR_VARIABLE) or _DEFAULT_STATE_DIR)
