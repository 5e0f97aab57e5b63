"""The options of ``paceline run --elastic``. What they do is in :mod:`paceline.elastic`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeVar

from paceline.elastic.handshake import read_key
from paceline.elastic.job import ElasticPlan
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.protocol import KEY_FILE
from paceline.errors import ConfigurationError
from paceline.launch.rendezvous import JobHosts

STUCK_AFTER_S = 300.0
LEASE_S = 15.0
_MIN_LEASE_S = 2.0
_Number = TypeVar("_Number", int, float)
_NEED_ELASTIC = ("min", "max", "spares", "hold", "stuck_after", "lease", "job_key")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("elastic training (docs/elastic.md)")
    add = group.add_argument
    add("--elastic", action="store_true",
        help="go on when ranks die; the script trains under @paceline.elastic.run")  # fmt: skip
    add("--min", metavar="N", type=int, help="fewer ranks do not train, but wait (default: 1)")
    add("--max", metavar="N", type=int,
        help="paceline scale may go as far (default: 4 times as many as at first)")  # fmt: skip
    add("--spares", metavar="N", type=int,
        help="so many more wait at train(state) for a rank to die (default: 0)")  # fmt: skip
    add("--hold", metavar="S", type=float,
        help="how long to wait for a replacement after a death (default: 0)")  # fmt: skip
    add("--stuck-after", metavar="S", type=float,
        help="a rank that is stopped or stuck for this long counts as dead; "
        f"0: never (default: {STUCK_AFTER_S:g})")  # fmt: skip
    add("--lease", metavar="S", type=float,
        help="a host that is silent for this long counts as dead; the same on all hosts "
        f"(default: {LEASE_S:g})")  # fmt: skip
    add("--job-key", metavar="FILE", type=Path,
        help="several hosts: a secret of the job, the same on all hosts, in a file that only you "
        f"can read (or {KEY_FILE})")  # fmt: skip


def make_elastic(args: argparse.Namespace, hosts: JobHosts) -> ElasticPlan | None:
    """Check the options; None without ``--elastic``.

    Raises:
        ConfigurationError: One is wrong.
    """
    given = {name: getattr(args, name) for name in _NEED_ELASTIC}
    if not args.elastic:
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise ConfigurationError(f"--{wrong[0].replace('_', '-')} needs --elastic")
        return None
    ranks = hosts.local_world * hosts.count
    minimum, maximum = _or(args.min, 1), _or(args.max, 4 * ranks)
    if not 1 <= minimum <= ranks <= maximum:
        raise ConfigurationError(
            f"--min, all ranks of all hosts and --max must not decrease, and begin at 1; not "
            f"{minimum}, {ranks}, {maximum}"
        )
    numbers = [value for name, value in given.items() if name != "job_key"]
    if any(value is not None and not 0 <= value < 1e6 for value in numbers):
        raise ConfigurationError("--spares, --hold, --stuck-after and --lease are not negative")
    lease_s = _or(args.lease, LEASE_S)
    policy = ElasticPolicy(
        ranks,
        minimum=minimum,
        spares=_or(args.spares, 0),
        hold_s=_or(args.hold, 0.0),
        hosts=hosts.minimum,
        max_hosts=hosts.count,
        gather_s=lease_s,
    )
    stuck_s = _or(args.stuck_after, STUCK_AFTER_S)
    return ElasticPlan(policy, maximum, stuck_s, lease_s, _key(args, hosts, lease_s))


def _key(args: argparse.Namespace, hosts: JobHosts, lease_s: float) -> bytes | None:
    """The secret that hosts prove to each other; on one host the launcher makes one."""
    if hosts.count == 1:
        for name in ("lease", "job_key"):
            if getattr(args, name) is not None:
                raise ConfigurationError(f"--{name.replace('_', '-')} is for several hosts")
        return None
    if lease_s < _MIN_LEASE_S:
        raise ConfigurationError(f"--lease is at least {_MIN_LEASE_S:g} s; not {lease_s:g}")
    path = args.job_key or os.environ.get(KEY_FILE)
    if not path:
        raise ConfigurationError(
            f"--elastic on several hosts needs --job-key FILE, or {KEY_FILE}: a secret of the job, "
            "the same on all hosts. Make one: (umask 077; head -c32 /dev/urandom | xxd -p -c64 > "
            "job.key)"
        )
    return read_key(Path(path))


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
