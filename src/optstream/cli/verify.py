"""Read every byte of a checkpoint and hold it against the digests that were saved with it."""

from __future__ import annotations

import argparse
import sys

from optstream.cli import target

SUMMARY = "check that a checkpoint is what was saved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    target.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Check, say so in one line, and return the exit code."""
    from optstream.checkpoint.verify import verify
    from optstream.training.checkpoint import check_weights

    optimizer, training = target.open_target(args.checkpoint)
    if training is not None:
        check_weights(training)
    verify(optimizer)
    what = "optimizer" if training is None else "optimizer, weights and trainer"
    sys.stdout.write(f"{args.checkpoint}: {what} as saved\n")
    return 0
