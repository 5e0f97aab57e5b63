"""Options that several benchmarks have, and the check of output files. No torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ConfigurationError

UNITS = {"K": 1 << 10, "M": 1 << 20}


def describe(parser: argparse.ArgumentParser, example: str) -> None:
    """Give a parser its examples, one command a line."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "example:\n" + "\n".join(f"  {line}" for line in example.splitlines())


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Add ``--json``, ``--plot`` and ``--timeout``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    if plot:
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="also draw it (needs matplotlib)"
        )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="for each run of ranks (default: 1800)",
    )


def positive(text: str) -> int:
    """Read an integer above 0, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def integers(text: str) -> list[int]:
    """Read comma-separated integers above 0, for argparse."""
    return [positive(part) for part in text.split(",")]


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names, for argparse."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(known)}")
        return names

    return read


def sizes(text: str) -> list[int]:
    """Read comma-separated numbers of bytes, such as 256,64K,25M, for argparse."""
    found = []
    for word in text.upper().split(","):
        number, unit = (word[:-1], UNITS[word[-1]]) if word[-1:] in UNITS else (word, 1)
        if not number.isdigit() or int(number) == 0 or int(number) * unit % 4:
            raise argparse.ArgumentTypeError(f"{word!r} is no number of bytes that 4 divides: 256K")
        found.append(int(number) * unit)
    return found


def check_outputs(args: argparse.Namespace) -> None:
    """Find out before anything is measured whether the files that are wanted can be written.

    Raises:
        ConfigurationError: One cannot; the text says why.
    """
    for option in ("json", "plot"):
        path: Path | None = getattr(args, option, None)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"--{option} {path}: there is no directory {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"--{option} {path}: this is a directory")
        target = path if path is None or path.exists() else path.absolute().parent
        if target is not None and not os.access(target, os.W_OK):
            raise ConfigurationError(f"--{option} {path}: this user may not write it")
    if getattr(args, "plot", None) is not None:
        _check_plot(args.plot)


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigurationError(
            f"--plot {path}: it cannot be drawn as {path.suffix or 'a file without a suffix'}; "
            f"write one of: {', '.join(sorted(kinds))}"
        )
