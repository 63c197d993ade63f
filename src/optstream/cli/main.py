"""Parse the command line, call one command, turn its end into an exit code.

Exit codes: 0 done; 1 failed, one line on standard error; 2 wrong usage; 128 + number of the signal
that ended it (130 for Ctrl-C, 143 for SIGTERM).
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

import optstream
from optstream.cli import doctor, export, inspect, ls, plan, train, verify
from optstream.cli.parser import Parser
from optstream.errors import OffloadError
from optstream.training.stop import Stopped

COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "doctor": doctor,
    "ls": ls,
    "plan": plan,
    "inspect": inspect,
    "verify": verify,
    "export": export,
}
"""Modules with SUMMARY, add_arguments(parser) and run(args) -> exit code."""


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(prog="optstream", description=optstream.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {optstream.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        command.add_argument(
            "--debug", action="store_true", help="show the traceback when something fails"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; argparse exits by itself on wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        sys.stderr.write("optstream: stopped by SIGINT\n")
        return 128 + signal.SIGINT
    except Stopped as stopped:
        sys.stderr.write(f"optstream: {stopped}\n")
        return 128 + stopped.signum
    except Exception as error:
        if args.debug:
            raise
        sys.stderr.write(f"optstream: {_one_line(error)}\n")
        return 1


def entry_point() -> None:
    """Be the `optstream` command."""
    # a path may have bytes that are no text; standard error does this by itself
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OffloadError):
        return text
    return f"{type(error).__name__}: {text}; --debug shows where"
