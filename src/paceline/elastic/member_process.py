"""The process of a member that the launcher has forked. Must not import torch.

Used by :mod:`paceline.elastic.job`; by ``autoload.py`` if the target is a program of its own, so
whatever imports Paceline imports this: it must stay cheap.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from paceline.launch.target import Target

MEMBER_PID = "PACELINE_ELASTIC_PID"
"""The environment variable with the process of the member; what it starts has the same value."""


def run_member(pipe: Connection, target: Target, rank: int, environ: Mapping[str, str]) -> int:
    """The whole life of a member, as ``run_rank``."""
    from paceline.launch.script import run_rank

    own = {MEMBER_PID: str(os.getpid())}
    os.environ |= own
    use_private_folder(environ)
    meet_in_private()
    return run_rank(pipe, target, rank, {**environ, **own})


def use_private_folder(environ: Mapping[str, str]) -> None:
    """Let multiprocessing (of DataLoader workers) put its sockets where the launcher removes them.

    It makes a folder in the temporary one, which a process that is killed leaves behind.
    """
    from multiprocessing.process import current_process
    from pathlib import Path

    from paceline.elastic.protocol import DIRECTORY, MEMBER, temporary_path

    own = temporary_path(Path(environ[DIRECTORY]), int(environ[MEMBER]))
    own.mkdir(mode=0o700, exist_ok=True)
    current_process()._config["tempdir"] = str(own)  # type: ignore[attr-defined]


def meet_in_private() -> None:
    """Let ``init_process_group()`` use a private store, if this process is a member."""
    if is_member():
        from paceline.elastic.epoch_store import replace_store

        replace_store()


def is_member() -> bool:
    """Whether this process is a member itself, and not one that a member has started."""
    return os.environ.get(MEMBER_PID) == str(os.getpid())
