"""The ``paceline`` command. Each subcommand is a module that is imported only when it is asked for.

A subcommand's module has ``add_arguments(parser)`` and ``run(args) -> exit code``. This file knows
their names and one line about each; it must not import torch, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "run": "run a training script on several ranks, and say which failed first, and why",
    "scale": "change the number of ranks of an elastic job that runs",
    "report": "what a run's records say: who slows it down, and why; one HTML page",
    "verify": "do two runs of a training over shards have the same bits, and what differs first",
    "doctor": "say what a running job does and who holds it up; check this machine",
    "bench": "measure on this machine: bench allreduce, ddp, hooks, hybrid, elastic, dp",
    "ps": "parameter servers: ps serve, ps stats, ps keys",
    "demo": "train a small network with torch's DDP and with Paceline, side by side; lose a rank",
}

EXAMPLE = """\
example:
  paceline run -n 2 train.py                    run a script on two ranks
  paceline report RUN --open                    who slows a run down, in which phase, and why
  paceline verify RUN OTHER                     have two runs over shards the same bits
  paceline doctor env                           is this machine fit, and what is to be fixed
  paceline bench ddp --model my.module:make     your own model: what to change, and what it gains
  paceline bench hooks --model small --seeds 0  which hook wins at which speed of the link
  paceline ps serve ipc:///tmp/t.sock           a parameter server for embedding tables
  paceline demo                                 torch and Paceline side by side; a rank that dies
"""

INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
NOBODY_READS = 141  # the same of SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("paceline: interrupted; all ranks are stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return NOBODY_READS
    finally:
        _flush()


def _flush() -> None:
    """Write out what was printed; if nobody reads it (``… | head``), leave no complaint of Python.

    That is: nothing for Python to write at its end.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):  # closed, or a disk that is full
        pass


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Data-parallel training for PyTorch.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        print(_no_such_command(chosen), file=sys.stderr)
        return 2
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary.capitalize() + "."
        )
        if name == chosen:
            importlib.import_module(f"paceline.cli.{name}").add_arguments(subparser)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        print(_no_such_option(_chosen(parser, args), unknown[0]), file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"paceline.cli.{args.command}").run(args)
    return code


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the subcommand, or of its subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _chosen(action.choices[getattr(args, action.dest)], args)
    return parser


def _no_such_command(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"paceline: there is no command {word}; {hint}"


def _no_such_option(parser: argparse.ArgumentParser, word: str) -> str:
    """Say it in a line, with the option that was probably meant."""
    what = "option" if word.startswith("-") else "argument"
    name = word.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; {parser.prog} --help lists them"
    after = parser.get_default("after_unknown_option") or ""
    return f"{parser.prog}: there is no {what} {name}{after}{hint}"
