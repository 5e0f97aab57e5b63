"""What the benchmarks' command lines have in common: options, Ctrl-C, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.testing import RanksFailedError, warm_up

INTERRUPTED = 130
PIPE_COLUMNS = 140


def parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    made.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for each run of ranks"
    )
    return made


def positive(text: str) -> int:
    """Read an integer above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names, for argparse."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(known)}")
        return names

    return read


def integers(text: str) -> list[int]:
    """Read comma-separated integers above 0, for argparse."""
    return [positive(part) for part in text.split(",")]


def console() -> Console:
    """Where tables are printed: a terminal as it is, a file or a pipe wide enough for numbers."""
    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, PIPE_COLUMNS))


def guarded(run: Callable[[], int]) -> int:
    """Run a benchmark; on Ctrl-C or a failed rank, say so in one place. All ranks are gone then."""
    try:
        with _ctrl_c_ignored():
            warm_up()
        return run()
    except KeyboardInterrupt:
        print("\ninterrupted; all ranks are stopped", file=sys.stderr)
        return INTERRUPTED
    except RanksFailedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        Console(stderr=True).show_cursor(True)  # rank 0 hides it, and may have been killed


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Let the fork server inherit that Ctrl-C is ignored; else it prints a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write results together with where they were measured."""
    if path is None:
        return
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }
    path.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")
