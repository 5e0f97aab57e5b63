"""``paceline demo``: the argument parsing, the start of the ranks, and the table at the end.

What the ranks do is in :mod:`paceline.cli.demo_training`, which is imported late because it brings
torch with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.demo_training import Digits, Outcome

MIN_ACCURACY = 0.97
TIMEOUT_S = 600.0
KIB, MIB = 1024, 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``paceline demo``."""
    parser.add_argument("--ranks", type=_positive, default=2, help="processes (default: 2)")
    parser.add_argument("--epochs", type=_positive, default=30, help="default: 30")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--plain-torch",
        action="store_true",
        help="use torch's DistributedDataParallel instead, for comparison",
    )


def run(args: argparse.Namespace) -> int:
    """Train and print what came out; 1 if the network did not learn enough, or a rank failed."""
    console = Console()
    try:
        outcome = _train(args, console)
    except ConfigurationError as error:
        print(f"paceline demo: {error}", file=sys.stderr)
        return 2
    console.print(_table(outcome, args))
    if outcome.accuracy < MIN_ACCURACY:
        console.print(f"[red]accuracy is below {MIN_ACCURACY:.0%}[/red]: try more --epochs")
        return 1
    return 0


def _train(args: argparse.Namespace, console: Console) -> Outcome:
    _require_sklearn()
    from paceline.cli.demo_training import Recipe, train
    from paceline.testing import run_ranks, warm_up

    with _ctrl_c_ignored():
        warm_up()
    digits = _load_digits(args.seed)
    recipe = Recipe(epochs=args.epochs, seed=args.seed, plain_torch=args.plain_torch)
    console.print(
        f"Training on {len(digits.train_labels)} images of handwritten digits, {args.ranks} ranks."
    )
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    try:
        outcomes = run_ranks(
            args.ranks, train, digits, recipe, timeout_s=TIMEOUT_S, threads=threads
        )
    finally:
        console.show_cursor(True)  # rank 0 hides it while it draws, and may have been killed
    return outcomes[0]


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment; processes started meanwhile ignore it for good.

    Otherwise the fork server answers it with a traceback while it imports torch.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _require_sklearn() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "the digits come with scikit-learn, which is missing: pip install scikit-learn"
        )


def _load_digits(seed: int) -> Digits:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels; a fifth is held out."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from paceline.cli.demo_training import Digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, random_state=seed, stratify=bunch.target
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def _table(outcome: Outcome, args: argparse.Namespace) -> Table:
    table = Table(title=f"{outcome.engine}, {args.ranks} ranks", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row(
        "accuracy on held-out digits",
        f"{outcome.accuracy:.2%}  ({outcome.correct} of {outcome.held_out})",
    )
    table.add_row("step time, median", f"{outcome.step_ms:.2f} ms")
    table.add_row("steps", f"{outcome.steps} in {outcome.train_s:.1f} s")
    table.add_row("parameters", f"{outcome.parameters:,}")
    buckets = "" if outcome.buckets is None else f" in {_count(outcome.buckets, 'bucket')}"
    table.add_row("gradients reduced, each step", f"{outcome.step_bytes / KIB:.1f} KiB{buckets}")
    table.add_row("gradients travel over", outcome.travelled_over)
    table.add_row("gradients reduced, in all", f"{outcome.total_bytes / MIB:.1f} MiB per rank")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
