"""``paceline verify``: do two trainings over shards have the same bits, and what differs first?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.observe.run_folder import find_run
from paceline.printable import printable
from paceline.report.verify import VerifyResult, compare_checkpoints, compare_runs

DESCRIPTION = """\
Compare two runs of a training over shards, step by step, from the checksums in their run folders;
or two checkpoints, bit for bit. Names the first step, and the parameters or the shard that differ.
A step is one loop over shards: an update that accumulates has several. Optimizers' states are in
checkpoints only; in runs one that differs shows in the parameters, one update later.
The exit code is 0 if all is equal, 1 if something differs, and 2 if there is nothing to compare."""

EXAMPLE = """\
examples:
  paceline verify latest paceline-runs/my-run    two runs, by name or folder
  paceline verify one-rank.pt four-ranks.pt      two files of torch.save
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("left", metavar="A", help="a run folder, its name, latest, or a checkpoint")
    parser.add_argument("right", metavar="B", help="what it is compared with")


def run(args: argparse.Namespace) -> int:
    """Compare, and say what was found."""
    try:
        verdict = _compare(args.left, args.right)
    except PacelineError as error:
        print(printable(f"paceline verify: {error}"), file=sys.stderr)
        return 2
    print(printable(verdict.text))
    return 0 if verdict.is_equal else 1


def _compare(left: str, right: str) -> VerifyResult:
    if Path(left).is_file() and Path(right).is_file():
        return compare_checkpoints(Path(left), Path(right))
    return compare_runs(find_run(left).path, find_run(right).path)
