"""``paceline bench elastic``: ranks are killed, and how soon training goes on; beside torchrun.

The options and the order of things. How contenders are started is in :mod:`.contenders`, killing
and measuring in :mod:`.kills`, what a commit costs while nothing fails in :mod:`.overhead`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.bench.elastic.contenders import CONTENDERS, why_not
from paceline.cli.bench.harness.options import add_outputs, describe, positive
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.bench.elastic.report import Result

EXAMPLE = """\
paceline bench elastic --ranks 2 --kills 2 --contenders paceline --rounds 0
paceline bench elastic --ranks 2 --kills 3 --rounds 2 --plot elastic.png"""
SHORT = {name.replace(", a ", "-"): name for name in CONTENDERS}
LIMIT_S = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    parser.add_argument(
        "--contenders",
        default=",".join(SHORT),
        metavar="A,B",
        help=f"of {', '.join(SHORT)} (default: all that are installed)",
    )
    parser.add_argument("--ranks", type=positive, default=4, help="on this machine (default: 4)")
    parser.add_argument("--kills", type=positive, default=10, help="of each (default: 10)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="in which steps with and without elastic training take turns; 0: none (default: 10)",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and show; 1 with --check if a target is missed."""
    from paceline.cli.bench.elastic import overhead, report

    chosen = _chosen(args.contenders)
    results = [_disturbed(name, args) for name in chosen]
    costs = overhead.measure(args.rounds, args.timeout) if args.rounds > 0 else []
    is_met = report.show(args, results, costs)
    return 1 if args.check and not is_met else 0


def _chosen(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word not in SHORT]
    if wrong or not words:
        raise ConfigurationError(f"--contenders {text}: choose from {', '.join(SHORT)}")
    return [SHORT[word] for word in words]


def _disturbed(contender: str, args: argparse.Namespace) -> Result:
    """Kill ranks of one contender."""
    import tempfile

    from paceline.cli.bench.elastic import kills
    from paceline.cli.bench.elastic.contenders import started
    from paceline.cli.bench.elastic.report import Result, read_phases
    from paceline.cli.bench.harness.progress import RoundBar

    problem = why_not(contender)
    if problem:
        return Result(contender, [], [], problem, [])
    found: list[kills.MeasuredKill] = []
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as name,
        RoundBar(f"{contender}: kills", args.kills) as bar,
    ):
        folder = Path(name)

        def on_kill(kill: kills.MeasuredKill) -> None:
            found.append(kill)
            bar.advance(f"next step after {kill.next_step_s:.2f} s")

        with started(contender, args.ranks, folder) as launcher:
            limit_s = min(LIMIT_S, args.timeout)
            try:
                kills.disturb(launcher, folder, args.ranks, args.kills, limit_s, on_kill)
            except kills.GaveUpError as error:
                problem = f"{error}; {_last_line(folder / 'output.txt')}"
        notes = kills.read_notes(folder)
        return Result(contender, found, notes, problem, read_phases(folder, found))


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"
