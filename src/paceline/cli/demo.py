"""``paceline demo``: the same training with torch's DDP and with Paceline's, and a rank that dies.

The options, the start of the ranks, and what is shown. What the ranks do is in
:mod:`paceline.cli.demo_training`, which is imported late because it brings torch with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from paceline.cli.bench.harness.options import describe, positive
from paceline.cli.fork_server import start_fork_server
from paceline.cores import usable_cores
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.demo_training import DemoNote, DemoOutcome, Digits

MIN_ACCURACY = 0.93
TIMEOUT_S = 600.0
SURVIVORS_S = 20.0
"""How long survivors may take to say something; then they are ended."""
WIDTH = 100
MIB = 1024 * 1024
EXAMPLE = """\
paceline demo
paceline demo --ranks 3 --epochs 6"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``paceline demo``."""
    describe(parser, EXAMPLE)
    parser.add_argument("--ranks", type=positive, default=2, help="of each wrapper (default: 2)")
    parser.add_argument("--epochs", type=positive, default=4, help="default: 4")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")


def run(args: argparse.Namespace) -> int:
    """Train, kill a rank, and print what came out; 1 if a network did not learn enough."""
    if importlib.util.find_spec("sklearn") is None:
        text = "the digits come with scikit-learn, which is missing: pip install scikit-learn"
        print(f"paceline demo: {text}", file=sys.stderr)
        return 2
    from paceline.testing import RanksFailedError

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        start_fork_server()
        outcomes = _train(args, console)
        notes = {outcome.wrapper: _lose_a_rank(outcome.wrapper, args.ranks) for outcome in outcomes}
        console.print(_table(args, outcomes, notes))
        if args.ranks > 1:
            _show_last_words(args.ranks, notes, console)
    except ConfigurationError as error:
        print(f"paceline demo: {error}", file=sys.stderr)
        return 2
    except RanksFailedError as error:
        print(f"paceline demo: {error}", file=sys.stderr)
        return 1
    finally:
        Console(stderr=True).show_cursor(True)  # rank 0 hides it, and may have been killed
    if min(each.accuracy for each in outcomes) < MIN_ACCURACY:
        console.print(f"[red]accuracy is below {MIN_ACCURACY:.0%}[/red]: try more --epochs")
        return 1
    return 0


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _threads(ranks: int) -> int:
    """One wrapper's ranks compute at a time."""
    return max(1, usable_cores() // ranks)


def _train(args: argparse.Namespace, console: Console) -> list[DemoOutcome]:
    """Return the outcome of the first rank of each wrapper."""
    from paceline.cli.demo_training import WRAPPERS, Recipe, train
    from paceline.testing import run_ranks

    digits = _load_digits(args.seed)
    console.print(
        f"Training on {len(digits.train_labels)} images of handwritten digits: "
        f"{_ranks(args.ranks)} with torch's DDP,\n{_ranks(args.ranks)} with Paceline's, in turn.",
        highlight=False,
    )
    recipe = Recipe(args.ranks, args.epochs, args.seed)
    found = run_ranks(
        args.ranks * len(WRAPPERS),
        train,
        digits,
        recipe,
        timeout_s=TIMEOUT_S,
        threads=_threads(args.ranks),
    )
    return found[:: args.ranks]


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


def _table(
    args: argparse.Namespace, outcomes: list[DemoOutcome], notes: dict[str, list[DemoNote]]
) -> Table:
    from paceline.cli.bench.harness.comparison import Comparison
    from paceline.cli.demo_training import PACELINE, TORCH

    times = Comparison("step", TORCH, {each.wrapper: each.turns_ms for each in outcomes})
    speed = times.speed(PACELINE)
    steps = sum(len(turn) for turn in outcomes[0].turns_ms)
    table = Table(title=f"{_ranks(args.ranks)}, {steps} steps with each")
    for heading in ("", TORCH, PACELINE, ""):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    table.add_row(
        "step time, median",
        *(f"{times.time_ms(each.wrapper).value:.1f} ms" for each in outcomes),
        escape(f"{speed.value:.2f} x as fast [{speed.low:.2f}, {speed.high:.2f}]"),
    )
    peaks = [max(note.peak_bytes or 0 for note in notes[each.wrapper]) for each in outcomes]
    if all(peaks):
        theirs, ours = peaks
        cells = (f"{peak / MIB:.0f} MiB" for peak in peaks)
        table.add_row("memory above the weights, peak", *cells, f"{ours / theirs - 1:+.0%}")
    table.add_row("accuracy on held-out digits", *(f"{o.accuracy:.1%}" for o in outcomes), "")
    table.add_row("gradients travel over", *(each.travelled_over for each in outcomes), "")
    return table


def _show_last_words(ranks: int, notes: dict[str, list[DemoNote]], console: Console) -> None:
    console.print(
        f"Then rank {ranks - 1} was killed (SIGKILL) in the middle of a backward. "
        f"{'Rank 0 raised' if ranks == 2 else 'The others raised'}:",
        highlight=False,
    )
    for wrapper, found in notes.items():
        lines = [
            f"rank {note.rank}, {note.at_s:.2f} s later: {note.text}"
            for note in found
            if note.at_s is not None
        ]
        text = "\n".join(lines) or f"nothing within {SURVIVORS_S:g} s"
        console.print(Panel(escape(text), title=wrapper, title_align="left"), highlight=False)


def _lose_a_rank(wrapper: str, ranks: int) -> list[DemoNote]:
    """Run ranks of which one dies; return their memory, and what the others say."""
    from paceline.cli.demo_training import lose_a_rank, read_notes
    from paceline.testing import RanksFailedError, run_ranks

    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as name:
        folder = Path(name)
        with contextlib.suppress(RanksFailedError):  # one is meant to die; notes tell the rest
            run_ranks(
                ranks,
                lose_a_rank,
                wrapper,
                folder,
                timeout_s=TIMEOUT_S,
                grace_s=SURVIVORS_S,
                threads=_threads(ranks),
            )
        return read_notes(folder)
