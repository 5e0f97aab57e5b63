"""Who is at the other end of a socket of this host. Called by ``ps/client/link.py``, for a trainer.

A trainer must not take rows from, or send gradients to, a server that another user has put at the
address of its own.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from paceline.memory.descriptors import is_same_user
from paceline.ps.protocol.settings import IPC, full_path


def is_own_peer(descriptor: int) -> bool:
    """Say whether a connection that libzmq made leads to a process of this user."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != socket.AF_UNIX:
                return True  # closed, and the number is something else's by now
            return is_same_user(connection)
    except OSError:  # closed meanwhile
        return True


class Obstacle(NamedTuple):
    """Why a trainer cannot connect.

    Attributes:
        text: For people; empty if there is none.
        is_final: Waiting does not help.
    """

    text: str = ""
    is_final: bool = False


def obstacle_at(address: str) -> Obstacle:
    """Why a socket's file cannot be connected to, as far as the file system tells."""
    path = Path(address.removeprefix(IPC))
    try:
        owner = path.stat().st_uid
    except FileNotFoundError:
        return Obstacle(_FULL if full_path(path).exists() else "")
    except OSError as error:
        reason = f"{path.parent} cannot be entered ({error.strerror}): is it another user's?"
        return Obstacle(reason, is_final=True)
    if owner == os.geteuid():
        return Obstacle()
    return Obstacle(
        f"{path} belongs to user {owner}, and this is user {os.geteuid()}: over ipc, a server "
        "answers its own user only; another one needs tcp and a key (`paceline ps keys`)",
        is_final=True,
    )


_FULL = (
    "the server is full: too many of its descriptors are in use; raise its limit (ulimit -n, "
    "LimitNOFILE=), or start fewer trainers for each server"
)
