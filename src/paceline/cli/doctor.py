"""``paceline doctor``: what a running job does, this user's jobs, whether the machine is fit.

    paceline doctor            this user's jobs on this host
    paceline doctor RUN        what each rank of a job does now, and who keeps the others waiting
    paceline doctor env        checks of this machine

The exit status tells programs: 0 nothing is wrong, 1 something is, 2 the question makes no sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.observe.jobs import running_jobs
from paceline.observe.launched import LaunchedRank, read_launched
from paceline.observe.run_folder import RunFolder, find_run
from paceline.observe.stall.report import describe_run, is_ended, is_stalled, report_json
from paceline.observe.stall.views import RankView, look_at_ranks, members
from paceline.printable import printable

FINE, WRONG, USAGE = 0, 1, 2
_ANSWER_WAIT_S = 2.5
_EXAMPLE = """\
example:
  paceline doctor                          this user's jobs on this host
  paceline doctor paceline-runs/my-run     what its ranks do at this moment, and who is late
  paceline doctor latest --json            the newest folder in paceline-runs, for programs
  paceline doctor env                      torch, memory, cores, network: what to fix here

exit status: 0 nothing is wrong; 1 a rank waits for one that is late, stopped or dead, or a check
failed; 2 there is no such run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run folder, 'latest', or 'env'; none: list jobs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; return the exit status."""
    if args.run is None:
        return _list_jobs(as_json=args.json)
    if args.run == "env" and not Path("env").is_dir():
        from paceline.cli.doctor_env import run_checks

        return run_checks(as_json=args.json)
    return _look(args.run, as_json=args.json)


def _look(name: str, *, as_json: bool) -> int:
    try:
        folder = find_run(name)
        views = look_at_ranks(folder, _ANSWER_WAIT_S)
    except (ConfigurationError, OSError) as error:
        print(f"paceline doctor: {error}", file=sys.stderr)
        return USAGE
    silent = _silent(folder, views)
    if as_json:
        told = report_json(views) | {"run": str(folder.path)}
        told["silent"] = [vars(each) | {"process": each.state.value} for each in silent]
        print(json.dumps(told, indent=1))
    else:
        print("\n".join([describe_run(folder, views), *_describe_silent(silent)]))
    return _status(views)


def _silent(folder: RunFolder, views: list[RankView]) -> list[LaunchedRank]:
    """Ranks that were started and have recorded nothing: they may hang before the first wrapper."""
    if is_ended(views):
        return []
    recorded = {view.rank for view in views}
    return [each for each in read_launched(folder) if each.rank not in recorded]


def _describe_silent(silent: list[LaunchedRank]) -> list[str]:
    if not silent:
        return []
    lines = [
        f"  rank {each.rank} (pid {each.pid} on {each.host}): {each.state.value}" for each in silent
    ]
    text = "Recording begins with the first wrapper. Ranks that paceline run has started before it:"
    return ["", printable(text, 200), *(printable(line, 200) for line in lines)]


def _status(views: list[RankView]) -> int:
    if not views:
        return WRONG
    if is_ended(views):
        return FINE if all(not view.status.detail for view in members(views)) else WRONG
    return WRONG if is_stalled(views) else FINE


def _list_jobs(*, as_json: bool) -> int:
    try:
        jobs = running_jobs()
    except ConfigurationError as error:
        print(f"paceline doctor: {error}", file=sys.stderr)
        return WRONG
    if as_json:
        print(json.dumps([vars(job) for job in jobs], indent=1))
    elif not jobs:
        print("No job of this user was started with `paceline run` on this host.")
        print("Of another launcher's job, name the folder that PACELINE_RUN_DIR is set to.")
    for job in jobs if not as_json else ():
        print(f"pid {job.pid}  {job.folder}  {' '.join(job.command)}")
    if jobs and not as_json:
        print(f"\nLook at one: paceline doctor {jobs[-1].folder}")
    return FINE
