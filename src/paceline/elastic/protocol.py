"""What the processes of an elastic job say to each other: one JSON object in each message.

Ranks talk to the launcher of their host, over a Unix socket. Launchers talk to the coordinator: a
process of its own that the first host's launcher starts, and starts again if it dies. All have
proved that they know the job's key (:mod:`paceline.elastic.handshake`). JSON, never pickles.

    rank           -> launcher       hello      its number among the members, its process
                                     joined     it has come to train(state)
                                     ready      it has left its epoch: step, is_clean
                                     entered    it trains in an epoch: the event, for the log
                                     done       train(state) has returned: step
                                     leave      it was told to end: it leaves after its step
                                     broken     a collective failed, and it heard of no death: why
                                     missing    ranks that do not come to the new epoch's store
                                     pong       its interpreter runs
    launcher       -> rank           begin      its place in the next epoch: the fields of Begin
                                     end        its epoch is over: why, and after which step
                                     regroup    leave after a step, with the others
                                     ping       say that your interpreter runs
                                     release    leave, for good: why, saves
                                     failed     the job is over: why (from a supervisor)
                                     away, back the coordinator is not there; is there again
    paceline scale -> launcher       scale      how many ranks there are to be
    launcher       -> paceline scale answer     what is wrong with that; empty: nothing

    launcher       -> coordinator    host       who it is, and a report of all its members
                                     alive      a beat ([Note: leases])
                                     listens    where its ranks listen
                                     from       what a rank has said
                                     exited     a rank's process has ended, and why
                                     still      ranks that have not moved for long, and where
                                     scale      what somebody asks for
                                     leaving    this host is told to end: ranks leave after a step
                                     stop       the job is told to end at once
                                     store      at which port of the first host the stores are
                                     finished   the job is over, and nothing runs here any more
    coordinator    -> launcher       welcome    whether it goes on where the connection broke
                                     refused    why it is not let in
                                     granted    the answer to a beat
                                     fork, kill a member
                                     say        what to tell a rank
                                     answer     to scale
                                     store      at which port of the first host the stores are
                                     epoch      an epoch has begun: the event, for the log
                                     scaled     how many ranks somebody has asked for
                                     peers      where ranks of other hosts listen
                                     outcome    the job is over; why, if it failed
                                     over       all hosts have finished
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import MembershipError

DIRECTORY = "PACELINE_ELASTIC_DIR"
"""The environment variable with the private directory of a host's launcher: sockets, key, stores
of the epochs."""

MEMBER = "PACELINE_ELASTIC_MEMBER"
"""The environment variable with this process's number among the members of the job."""

ATTEMPT = "PACELINE_ELASTIC_ATTEMPT"
"""The environment variable with the number under which members meet that begin together."""


HOSTS = "PACELINE_ELASTIC_HOSTS"
"""The environment variable with the number of hosts, if ranks may be elsewhere."""

KEY_FILE = "PACELINE_JOB_KEY_FILE"
"""The environment variable that names the file with the job's key, as ``--job-key`` does."""

MAX_BYTES = 1 << 20  # also what a peer may make us hold before it is known


def socket_path(directory: Path) -> str:
    """Where a launcher listens to its ranks."""
    return str(directory / "launcher")


def coordinator_path(directory: Path) -> str:
    """Where the coordinator listens to the launcher of its own host."""
    return str(directory / "coordinator")


def key_path(directory: Path) -> Path:
    """The job's key."""
    return directory / "key"


def lease_path(directory: Path) -> Path:
    """Until when ranks of this host may go on, if it has a lease."""
    return directory / "lease"


def peers_path(directory: Path) -> Path:
    """Where ranks of other hosts listen."""
    return directory / "peers"


def store_path(directory: Path, name: str) -> Path:
    """The file in which the ranks of one host meet."""
    return directory / name


def temporary_path(directory: Path, member: int) -> Path:
    """Where Python's multiprocessing puts the sockets of a member: gone with its process."""
    return directory / f"member-{member}"


def stores_path(directory: Path) -> str:
    """Where the ranks of several hosts reach their stores."""
    return str(directory / "stores")


def send(pipe: Connection, kind: str, **facts: Any) -> None:
    """Say something."""
    pipe.send_bytes(json.dumps({"kind": kind, **facts}).encode())


def receive(pipe: Connection) -> dict[str, Any]:
    """Take one message.

    Raises:
        EOFError: The other end is gone.
        MembershipError: It is no message.
    """
    data = pipe.recv_bytes(MAX_BYTES)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise MembershipError("what came from the other end is no message of this protocol")
    return message
