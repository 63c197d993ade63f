"""Write a checkpoint's optimizer state for programs that do not know optstream.

OUT that ends in .pt or .pth: one file with a torch state_dict, which the plain optimizer loads;
float32 masters of bfloat16 parameters are in it under "masters", by name. Another OUT: a directory
of safetensors files with an index.json.
"""

from __future__ import annotations

import argparse
import sys

from optstream.cli import target
from optstream.cli.parser import given_path
from optstream.units import format_bytes

SUMMARY = "write a checkpoint as a torch file, or as ordinary safetensors files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    target.add_argument(parser)
    parser.add_argument(
        "out",
        type=given_path,
        metavar="OUT",
        help="a file that ends in .pt or .pth, or a directory for safetensors files",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file, or an older export's directory"
    )


def run(args: argparse.Namespace) -> int:
    """Export, say what was written, and return the exit code."""
    from optstream.checkpoint.export import export

    optimizer, _ = target.open_target(args.checkpoint)
    num_bytes = export(optimizer.absolute(), args.out.absolute(), force=args.force)
    sys.stdout.write(f"{args.out}: {format_bytes(num_bytes)} of state\n")
    return 0
