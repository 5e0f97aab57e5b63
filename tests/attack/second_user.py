"""A process of another user of this host, and servers for it to attack."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.process import serve, set_up_logging
from tests.children import child_process, server_process

NOBODY = 65534
DEADLINE_S = 60.0


def as_other_user(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work`` returns, or ``{"error": its class}``, in a process of user ``NOBODY``."""
    with child_process(_drop_and_work, work, arguments) as child:
        assert child.pipe.poll(DEADLINE_S), "the other user did not come to an end"
        return child.pipe.recv()


def _drop_and_work(
    writer: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    assert os.geteuid() == NOBODY
    try:
        writer.send(work(*arguments))
    except Exception as error:
        writer.send({"error": type(error).__name__, "text": str(error)})


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory that every user may enter and write: the worst place for a socket."""
    path = Path(tempfile.mkdtemp(prefix="paceline-shared-"))
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _serve_without_umask(ready: Connection, settings: ServerSettings, log: str) -> None:
    os.umask(0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    set_up_logging()
    serve(settings, ready.send)


@contextmanager
def careless_server(settings: ServerSettings, log: Path) -> Iterator[str]:
    """A server that was started with umask 0; gives its address."""
    with server_process(_serve_without_umask, settings, str(log)) as (address, _):
        yield address
