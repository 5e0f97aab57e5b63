"""``paceline bench WHAT``: measurements on this machine, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib

SUBJECTS = {
    "hooks": "communication hooks: what each sends and costs, and which wins at which speed",
    "hybrid": "hybrid training: trainers with a dense network, servers with embedding tables",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured, with the options of each."""
    subparsers = parser.add_subparsers(dest="subject", metavar="what", required=True)
    for name, summary in SUBJECTS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary + ".")
        importlib.import_module(f"paceline.cli.bench.{name}").add_arguments(subparser)


def run(args: argparse.Namespace) -> int:
    """Measure."""
    code: int = importlib.import_module(f"paceline.cli.bench.{args.subject}").run(args)
    return code
