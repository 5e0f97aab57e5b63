"""``paceline run``: the command line of the launcher. What it does is in :mod:`paceline.launch`."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from importlib import metadata

from paceline.cli import elastic_options
from paceline.config import TRANSPORT_VARIABLE
from paceline.cores import usable_cores
from paceline.elastic.job import ElasticJob
from paceline.errors import ConfigurationError
from paceline.launch.child import ForkServerError
from paceline.launch.environment import PATCH, STALL_AFTER
from paceline.launch.job import Job, JobPlan
from paceline.launch.rendezvous import UNNUMBERED, Endpoint, JobHosts, is_local
from paceline.launch.screen import Screen, make_table
from paceline.launch.target import Target, TargetKind
from paceline.observe.jobs import listed_job
from paceline.observe.masked import masked
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.observe.stall.start import MIN_STALL_S

DESCRIPTION = """\
Run a training script on several ranks of this host, or of several hosts.

Ranks are forked from a process that has torch imported. They find the environment that torchrun
gives them. If one fails, the others are ended, and one block says which was the first, and why."""

EXAMPLE = """\
examples:
  paceline run -n 2 examples/train_mlp.py --epochs 2      two ranks on this host
  paceline run -n 4 -m my.training --lr 0.1               a module
  paceline run --elastic -n 4 --spares 1 train.py         go on when ranks die
  paceline run -n 4 --patch train.py                      torch's DDP in it becomes Paceline's

  on two hosts, node0 being the first:
  paceline run -n 4 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 train.py
  paceline run -n 4 --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29400 train.py

  With --elastic and --job-key FILE (a secret, the same on both) they go on when ranks or hosts are
  lost: docs/elastic.md.

output:
  rank 0 writes to the terminal as it is, other ranks with their number before each line; --tee
  chooses. The whole output of each rank is in the run folder (paceline-runs/), with the reason of
  a failure. Options of paceline come before the script, those of the script after it.
"""

_MAX_RANKS = 4096
_DEFAULT_PORT = 29400  # torchrun's
_MAX_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``paceline run``; torchrun's names where it has them."""
    parser.usage = "paceline run [options] script.py [its options]"
    parser.description, parser.epilog = DESCRIPTION, EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-n", "--nproc-per-node", "--nproc_per_node", metavar="N", default="1",
        help="ranks on this host; auto is one for each core it may use (default: 1)")  # fmt: skip
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--no-python", "--no_python", action="store_true", help="the script is any program")
    add("--transport", choices=["auto", "shm", "c10d"],
        help="what gradients travel over, where the script does not say it")  # fmt: skip
    add("--patch", action="store_true", help="torch's DDP becomes Paceline's, in any script")
    add("--run-dir", metavar="DIR",
        help="the run folder: new or empty (default: a new one in paceline-runs/)")  # fmt: skip
    add("--tee", metavar="RANKS", default="all",
        help="whose output is shown: all, none, or numbers on this host such as 0,2")  # fmt: skip
    add("--stall-after", metavar="S", type=_stall_seconds,
        help="report waits and parts of a step that take longer (default: learned)")  # fmt: skip
    add("--shutdown-timeout", "--shutdown_timeout", metavar="S", type=_seconds, default=3.0,
        help="from Ctrl-C or SIGTERM to SIGKILL (default: 3)")  # fmt: skip
    elastic_options.add_arguments(parser)
    hosts = parser.add_argument_group("several hosts, as torchrun has them")
    add = hosts.add_argument
    add("--nnodes", metavar="N", default="1",
        help="how many hosts; with --elastic also MIN:MAX (default: 1)")  # fmt: skip
    add("--node-rank", "--node_rank", metavar="R", type=int,
        help="which one this is (default: 0 at the endpoint; of two, 1 on the other)")  # fmt: skip
    add("--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT",
        help=f"where host 0 serves the store (port: {_DEFAULT_PORT}; one host: any)")  # fmt: skip
    add("--rdzv-id", "--rdzv_id", metavar="ID", help="a name of the job, the same on all hosts")
    add("--rdzv-backend", "--rdzv_backend", choices=["c10d", "static"],
        help="either is a store on host 0, which is what there is")  # fmt: skip
    add("--standalone", action="store_true", help="one host, any free port: the default")
    add("--master-addr", "--master_addr", metavar="HOST", help="the same as --rdzv-endpoint")
    add("--master-port", "--master_port", metavar="PORT", type=int, help="of --master-addr")
    parser.set_defaults(after_unknown_option="; options of the script come after it")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the job; the exit status is that of the rank that failed first."""
    try:
        plan = make_plan(args)
        elastic = elastic_options.make_elastic(args, plan.hosts)
        plan.target.check()
        folder = _make_folder(args, plan)
        table = make_table(folder, plan.hosts.local_world * plan.hosts.count)
        with listed_job(folder.path, masked(plan.target.words)), Screen(table) as screen:
            job = (
                ElasticJob(plan, folder, screen, elastic) if elastic else Job(plan, folder, screen)
            )
            return job.run()
    except (ConfigurationError, ForkServerError) as error:
        print(f"paceline run: {error}", file=sys.stderr)
        return 2


def make_plan(args: argparse.Namespace) -> JobPlan:
    """Check the options.

    Raises:
        ConfigurationError: One is wrong; the text says what may be written.
    """
    target = _target(args)
    ranks = _ranks(args.nproc_per_node)
    options = {}
    if args.transport:
        options[TRANSPORT_VARIABLE] = args.transport
    if args.patch:
        options[PATCH] = "1"
    if args.stall_after is not None:
        options[STALL_AFTER] = f"{args.stall_after:g}"
    return JobPlan(
        target=target,
        hosts=_hosts(args, ranks),
        run_id=args.rdzv_id or str(uuid.uuid4()),
        options=options,
        shown=_shown(args.tee, ranks),
        shutdown_s=args.shutdown_timeout,
    )


def _target(args: argparse.Namespace) -> Target:
    words: list[str] = args.script
    if not words:
        raise ConfigurationError("which script? For example: paceline run -n 2 train.py")
    name, *rest = words
    if name == "--" and rest:
        name, *rest = rest
    if name.startswith("-"):
        raise ConfigurationError(f"there is no option {name}; paceline run --help lists them")
    if args.module and args.no_python:
        raise ConfigurationError("-m and --no-python exclude each other")
    kind = TargetKind.COMMAND if args.no_python else TargetKind.SCRIPT
    return Target(TargetKind.MODULE if args.module else kind, name, tuple(rest))


def _ranks(text: str) -> int:
    if text in ("auto", "cpu"):
        return usable_cores()
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= _MAX_RANKS:
        raise ConfigurationError(f"-n is a number from 1 to {_MAX_RANKS}, or auto; not {text}")
    return int(text)


def _hosts(args: argparse.Namespace, ranks: int) -> JobHosts:
    low, colon, high = args.nnodes.partition(":")
    is_range = bool(colon) and high != low
    if not low.isdigit() or int(low) < 1 or (colon and not high.isdigit()):
        raise ConfigurationError(f"--nnodes is a number from 1 on, or MIN:MAX; not {args.nnodes}")
    if is_range and not args.elastic:
        raise ConfigurationError(
            f"--nnodes {args.nnodes} needs --elastic; without it the hosts stay the same"
        )
    count = int(high or low)
    if count < int(low):
        raise ConfigurationError(f"--nnodes MIN:MAX must not decrease; not {args.nnodes}")
    if args.standalone and (count > 1 or args.rdzv_endpoint or args.master_addr):
        raise ConfigurationError("--standalone is one host, which needs no endpoint: leave it out")
    if args.node_rank is not None and not 0 <= args.node_rank < count:
        raise ConfigurationError(
            f"--node-rank is a number from 0 to {count - 1} with --nnodes {count}; not "
            f"{args.node_rank}"
        )
    endpoint = _endpoint(args, count)
    return JobHosts(count, _number(args, count, endpoint), ranks, endpoint, int(low))


def _number(args: argparse.Namespace, count: int, endpoint: Endpoint) -> int:
    """Which host this is; torchrun's commands do not say it, and are the same on all hosts."""
    if args.node_rank is not None:
        return int(args.node_rank)
    if count == 1 or is_local(endpoint.host):
        return 0
    if count == 2:
        return 1
    if args.elastic:  # a host that comes back has the number that it had
        raise ConfigurationError(
            f"--elastic with --nnodes {args.nnodes} needs --node-rank: {endpoint.host} is another "
            f"machine and has 0, so this one has a number from 1 to {count - 1}"
        )
    return UNNUMBERED


def _endpoint(args: argparse.Namespace, count: int) -> Endpoint:
    if args.rdzv_endpoint and (args.master_addr or args.master_port is not None):
        raise ConfigurationError(
            "--rdzv-endpoint HOST:PORT and --master-addr, --master-port say the same: give one"
        )
    if args.master_port is not None and not int(count > 1) <= args.master_port <= _MAX_PORT:
        raise ConfigurationError(
            f"--master-port is a number from 1 to {_MAX_PORT}; not {args.master_port}"
        )
    text = args.rdzv_endpoint or args.master_addr or ""
    if count > 1 and not text:
        raise ConfigurationError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on all hosts")
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, ""
    if port and args.master_port is not None:
        raise ConfigurationError(f"--master-addr {text} has a port, and there is --master-port")
    low = int(count > 1)  # 0 is any free one, which other hosts would not know
    if colon and not (port.isdigit() and low <= int(port) <= _MAX_PORT):
        name = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr"
        raise ConfigurationError(
            f"{name} is HOST:PORT, for example node0:29400, with a port from 1 to {_MAX_PORT}; not "
            f"{text}"
        )
    default = _DEFAULT_PORT if count > 1 else 0
    if args.master_port is not None:
        default = args.master_port
    return Endpoint(host or "localhost", int(port or default))


def _shown(text: str, ranks: int) -> frozenset[int] | None:
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    numbers = text.split(",")
    if not all(number.isdigit() and int(number) < ranks for number in numbers):
        raise ConfigurationError(
            f"--tee is all, none or numbers from 0 to {ranks - 1} such as 0,2; not {text}"
        )
    return frozenset(map(int, numbers))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds, not {text}")
    return value


def _stall_seconds(text: str) -> float:
    value = _seconds(text)
    if value < MIN_STALL_S:
        raise argparse.ArgumentTypeError(
            f"a number of seconds, {MIN_STALL_S:g} and more; leave it out to have it learned; not "
            f"{text}"
        )
    return value


def _make_folder(args: argparse.Namespace, plan: JobPlan) -> RunFolder:
    """The run folder; if it has no name, any place is better than no training."""
    hosts, words = plan.hosts, plan.target.words
    try:
        folder = RunFolder.create(plan.target.name, args.run_dir, join=hosts.number != 0)
        if hosts.number == 0 or args.run_dir is None:
            # Else it may be host 0's folder, on a file system that they share; not even made yet.
            folder.write_info(_info(folder, hosts, words))
    except (ConfigurationError, OSError) as error:
        if args.run_dir is not None:
            raise _as_configuration_error(error, args.run_dir) from error
        folder = _temporary_folder(error)
        try:
            folder.write_info(_info(folder, hosts, words))
        except OSError as second:
            text = f"run.json cannot be written there: {second.strerror}. Training goes on"
            print(f"paceline run: {text}", file=sys.stderr)
    return folder


def _as_configuration_error(error: Exception, run_dir: str) -> ConfigurationError:
    if isinstance(error, ConfigurationError):
        return error
    reason = getattr(error, "strerror", None) or error
    return ConfigurationError(
        f"nothing can be written to the run folder {run_dir}: {reason}; choose another place with "
        "--run-dir"
    )


def _temporary_folder(error: Exception) -> RunFolder:
    try:
        folder = RunFolder(tempfile.mkdtemp(prefix="paceline-run-"))
    except OSError as second:
        raise ConfigurationError(f"{error}; nor can a temporary one: {second}") from error
    print(f"paceline run: {error}. Logs are in {folder.path}", file=sys.stderr)
    return folder


def _info(folder: RunFolder, hosts: JobHosts, words: Sequence[str]) -> RunInfo:
    return RunInfo(
        name=folder.path.name,
        command=masked(words),
        world=hosts.local_world * hosts.count,
        hosts=hosts.count,
        launcher_pid=os.getpid(),
        began_s=time.time(),
        versions={
            **{name: _version(name) for name in ("paceline", "torch")},
            "python": platform.python_version(),
        },
    )


def _version(name: str) -> str:
    """Of a package; one that was not installed by pip need not say it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
