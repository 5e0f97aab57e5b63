"""``paceline bench WHAT``: measurements on this machine, each in a module of its own.

A subject's module has ``add_arguments(parser)`` and ``run(args) -> exit code``, and imports torch
only when it measures. What all of them have in common is in :mod:`~.harness`.
"""

from __future__ import annotations

import argparse
import importlib

from paceline.cli.bench.harness.subject import run_subject

SUBJECTS = {
    "allreduce": "all-reduce of a tensor: Paceline beside gloo, and MPI and DeepSpeed if installed",
    "ddp": "a training step, with our models or yours: Paceline beside torch, and what to change",
    "hooks": "communication hooks: what each sends, costs and loses, and which wins at which speed",
    "hybrid": "hybrid training: trainers with a dense network, servers with embedding tables",
    "elastic": "ranks that are killed: how soon training goes on; beside torchrun and torchft",
    "dp": "DataParallel on CPU replicas beside the plain module",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured, with the options of each."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "example:\n  paceline bench ddp --model small --ranks 2 --launches 1 --rounds 4"
    subparsers = parser.add_subparsers(dest="subject", metavar="what", required=True)
    for name, summary in SUBJECTS.items():
        description = summary[0].upper() + summary[1:] + "."
        subparser = subparsers.add_parser(name, help=summary, description=description)
        importlib.import_module(f"paceline.cli.bench.{name}").add_arguments(subparser)


def run(args: argparse.Namespace) -> int:
    """Measure."""
    subject = importlib.import_module(f"paceline.cli.bench.{args.subject}")
    return run_subject(f"paceline bench {args.subject}", subject.run, args)
