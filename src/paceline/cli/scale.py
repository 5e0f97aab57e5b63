"""``paceline scale``: another number of ranks for an elastic job that runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.elastic.handshake import connect, read_key
from paceline.elastic.protocol import key_path, receive, send, socket_path
from paceline.errors import ConfigurationError, MembershipError, PacelineError
from paceline.observe.run_folder import RunFolder, find_run

DESCRIPTION = """\
Change the number of ranks of a job that was started with paceline run --elastic, on any host of it.
Ranks that are too many leave after a step; new ones join between two steps."""

EXAMPLE = """\
examples:
  paceline scale latest 6                             the newest run below this directory
  paceline scale paceline-runs/20260101-train-17 2    by its folder
"""

ANSWER_S = 60.0
"""How long a launcher may take to answer on a busy machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="a run folder, its name, or latest")
    parser.add_argument("ranks", metavar="N", type=int, help="how many ranks there are to be")


def run(args: argparse.Namespace) -> int:
    """Ask the job's coordinator; the ranks change after it has answered."""
    try:
        folder = find_run(args.run)
        ask(folder, args.ranks)
    except PacelineError as error:
        print(f"paceline scale: {error}", file=sys.stderr)
        return 2
    print(f"{folder.path}: going to {args.ranks} ranks; its membership.jsonl says when it is done")
    return 0


def ask(folder: RunFolder, ranks: int) -> None:
    """Ask for another number of ranks.

    Raises:
        ConfigurationError: The job is over, is not elastic, or may not have so many.
    """
    try:
        directory = Path(folder.coordinator.read_text())
        with connect(socket_path(directory), read_key(key_path(directory))) as pipe:
            send(pipe, "scale", ranks=ranks)
            if not pipe.poll(ANSWER_S):
                raise MembershipError(f"its launcher has not answered for {ANSWER_S:g} s")
            answer = receive(pipe)
    except (OSError, EOFError, MembershipError) as error:
        raise ConfigurationError(
            f"{folder.path} is no elastic job that runs on this host, or not of this user: {error}"
        ) from error
    if answer.get("error"):
        raise ConfigurationError(str(answer["error"]))
