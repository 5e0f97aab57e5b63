"""A rank's part in getting a supervisor, where ``paceline run --elastic`` has not started it.

Called by :mod:`paceline.elastic.session` when ``train(state)`` is called. Collective over the group
that the ranks have. What follows is written in :mod:`paceline.elastic.supervised.supervisor`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.elastic.handshake import read_key
from paceline.elastic.protocol import DIRECTORY, MEMBER, key_path
from paceline.elastic.supervised.outcome import tell_stand_in
from paceline.elastic.supervised.own_stand_in import warn_without_stand_in
from paceline.errors import ConfigurationError
from paceline.liveness.identity import describe_process
from paceline.transport.exchange import gather_json
from paceline.transport.messages import GroupMessages

logger = logging.getLogger("paceline.elastic")

_WHAT = "the beginning of elastic training"
_START_S = 60.0
_ROOT = str(Path(__file__).parents[3])
_NOT_HERE = (
    "these ranks are on several hosts and were not started by `paceline run --elastic`: if one of "
    "them dies, the job ends. state.save() and state.load() keep what was done"
)


def find_supervisor() -> bool:
    """Let the ranks of the default group, if they are all on this host, have a supervisor.

    Returns:
        Whether there is one: then the environment says where, as under ``paceline run --elastic``.

    Raises:
        ConfigurationError: On all ranks, if it cannot be started.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    assert dist.group.WORLD is not None
    rank, messages = dist.get_rank(), GroupMessages(dist.group.WORLD)
    device = torch.device("cpu")
    me = describe_process(rank).to_json()
    everybody = gather_json(messages, _WHAT, me, device)
    if len({each["host"] for each in everybody}) > 1:
        if rank == 0:
            logger.warning(_NOT_HERE)
        return False
    mine = _start(everybody) if rank == 0 else {}
    found = gather_json(messages, _WHAT, mine, device)[0]
    if "error" in found:
        raise ConfigurationError(f"elastic training cannot begin: {found['error']}")
    read_key(key_path(Path(found["directory"])))  # of this user, or of nobody whom we trust
    os.environ |= {DIRECTORY: found["directory"], MEMBER: str(rank)}
    if rank == 0:
        warn_without_stand_in()
    tell_stand_in(Path(found["directory"]))
    return True


def leave_supervisor(*, has_failed: bool) -> None:
    """The next function under ``@elastic.run`` gets another. Who has failed is still in the job."""
    if not has_failed:
        tell_stand_in(None)
    for name in (DIRECTORY, MEMBER):
        os.environ.pop(name, None)


def _start(ranks: list[Any]) -> dict[str, str]:
    """Start it, and hear where it is; or what went wrong."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *_python_path()])}
    try:
        order = {"ranks": [[each["pid"], each["started"]] for each in ranks]}
        answer = subprocess.run(
            [sys.executable, "-m", "paceline.elastic.supervised.supervisor"],
            input=json.dumps(order).encode() + b"\n",
            stdout=subprocess.PIPE,
            env=environ,
            timeout=_START_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"its supervisor could not be started: {error}"}
    if not answer:
        return {"error": "its supervisor has ended; the log of rank 0 says why"}
    found: dict[str, str] = json.loads(answer)
    return found


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
