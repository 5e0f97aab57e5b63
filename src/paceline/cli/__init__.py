"""The ``paceline`` command. Each subcommand is a module that is imported only when it is asked for.

A subcommand's module has ``add_arguments(parser)`` and ``run(args) -> exit code``. This file knows
their names and one line about each; it must not import torch, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "bench": "measure on this machine: bench hooks, bench hybrid",
    "ps": "parameter servers: ps serve, ps stats, ps keys",
    "demo": "train a small network on handwritten digits, on several ranks of this machine",
}

EXAMPLE = """\
example:
  paceline demo --ranks 2                train with Paceline, see accuracy and step time
  paceline bench hooks --plot hooks.png  which hook wins at which speed of the link
  paceline bench hybrid --trainers 2     embedding servers: torch's recipe beside ours
  paceline ps serve ipc:///tmp/t.sock    a parameter server for embedding tables
  paceline demo --ranks 2 --plain-torch  the same with torch's own DistributedDataParallel
"""

INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("paceline: interrupted; all ranks are stopped", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Data-parallel training for PyTorch.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary.capitalize() + "."
        )
        if name == chosen:
            importlib.import_module(f"paceline.cli.{name}").add_arguments(subparser)
    args = parser.parse_args(words)
    code: int = importlib.import_module(f"paceline.cli.{args.command}").run(args)
    return code
