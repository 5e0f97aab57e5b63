"""``ps.local``: servers on this host that end with whoever started them. No set-up.

Called by users and tests. One process of their own looks after them
(``ps/launch/supervisor.py``); this file starts it and talks to it. Must not import torch or zmq.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.errors import ConfigurationError, ServersClosedError, ServerStartError
from paceline.forks import Owner, finalize_here
from paceline.launch.child import Child
from paceline.launch.fork_server import TORCH, ForkServer, shared_fork_server
from paceline.launch.wire import EndPolicy
from paceline.ps.protocol.settings import GIB, ServerSettings

START_S = 60.0
"""How long servers may take to answer, importing torch included."""
_END_S = 15.0
_PRELOAD = "paceline.ps.launch.supervisor"
StartMethod = Literal["spawn", "forkserver"]


def local(
    n: int = 1,
    directory: str | os.PathLike[str] | None = None,
    *,
    restart: bool = False,
    fsync: bool = False,
    snapshot_every_s: float = 60.0,
    max_bytes: int = 0,
    max_message_bytes: int = GIB,
    save_root: str | os.PathLike[str] = "/",
    start_method: StartMethod = "spawn",
) -> LocalServers:
    """Start servers on this host; they end with the returned object, or with this process.

    >>> from paceline import ps
    >>> with ps.local(2) as servers:
    ...     len(servers.addresses)
    2

    Args:
        n: How many.
        directory: Where they keep journal and snapshots, one directory for each below it. None
            keeps tables in memory only.
        restart: Start a server again that dies; needs ``directory``.
        fsync: See :class:`ServerSettings`.
        snapshot_every_s: See :class:`ServerSettings`.
        max_bytes: Of each server; see :class:`ServerSettings`.
        max_message_bytes: See :class:`ServerSettings`.
        save_root: They save and load below this directory only. They answer programs of this user
            only, so by default that is any.
        start_method: ``"spawn"`` imports torch in a new process. ``"forkserver"`` forks from the
            process that ``testing.run_ranks`` forks ranks from, which has imported torch if it was
            used before: faster.

    Raises:
        ConfigurationError: An argument is wrong.
        ServerStartError: A server did not start; the text has its reason.
    """
    if type(n) is not int or not 1 <= n <= 4096:
        raise ConfigurationError(f"ps.local starts 1 to 4096 servers, as an int, not {n!r}")
    if restart and directory is None:
        raise ConfigurationError(
            "restart=True without a directory: a server that comes back empty is no help"
        )
    if start_method not in get_args(StartMethod):
        raise ConfigurationError(f'start_method is "spawn" or "forkserver", not {start_method!r}')
    sockets = Path(tempfile.mkdtemp(prefix="paceline-ps-"))  # only this user may enter it
    try:
        settings = [
            ServerSettings(
                address=f"ipc://{sockets / f'{index}.sock'}",
                directory=None if directory is None else Path(directory).absolute() / str(index),
                fsync=fsync,
                snapshot_every_s=snapshot_every_s,
                max_bytes=max_bytes,
                max_message_bytes=max_message_bytes,
                save_root=Path(save_root).absolute(),
            )
            for index in range(n)
        ]
        return LocalServers(settings, sockets, restart, start_method)
    except BaseException:
        shutil.rmtree(sockets, ignore_errors=True)
        raise


class LocalServers:
    """Servers that this process owns. A context manager.

    Attributes:
        addresses: One for each, as ``ps.connect`` takes them.
    """

    def __init__(
        self,
        settings: list[ServerSettings],
        sockets: Path,
        restart: bool,
        start_method: StartMethod,
    ) -> None:
        self.addresses = [each.address for each in settings]
        own = ForkServer([*TORCH, _PRELOAD], path=sys.path) if start_method == "spawn" else None
        server = own or shared_fork_server([_PRELOAD])
        child = server.fork(EndPolicy(first=None, grace_s=_END_S), may_fork=True)
        self._pipe = child.pipe
        self._owner = Owner()
        self._finalizer = finalize_here(self, _end, child, own, sockets)
        child.run(_run_supervisor, settings, restart, sockets)
        try:
            self._start(range(len(settings)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.addresses)

    def kill(self, index: int) -> None:
        """Kill a server with SIGKILL, and return when it is dead. For tests of what comes then."""
        self._order("kill", index)
        self._wait_answers({index}, "died")

    def restart(self, index: int) -> None:
        """Start a server that is dead, and return when it answers; nothing if it runs.

        Raises:
            ServerStartError: It cannot.
        """
        self._start([index])

    def close(self) -> None:
        """End all servers, those with a directory after a last snapshot. Idempotent."""
        self._finalizer()

    def _start(self, indices: range | list[int]) -> None:
        for index in indices:
            self._order("start", index)
        self._wait_answers(set(indices), "address")

    def _order(self, what: str, index: int) -> None:
        if not 0 <= index < len(self.addresses):
            raise ConfigurationError(f"there is no server {index}, of {len(self.addresses)}")
        if not self._owner.is_here():
            raise ServersClosedError(
                f"{what}: these servers belong to process {self._owner.pid}, and this is a forked "
                "child, which can connect to them (ps.connect) but not start or end them",
                server=index,
                address=self.addresses[index],
                operation=what,
            )
        try:
            self._pipe.send_bytes(json.dumps({"do": what, "index": index}).encode())
        except OSError:
            raise ServerStartError("these servers have ended: make new ones") from None

    def _wait_answers(self, waiting: set[int], wanted: str) -> None:
        until_s = time.monotonic() + START_S
        while waiting:
            if not self._pipe.poll(max(0.0, until_s - time.monotonic())):
                raise ServerStartError(
                    f"server {min(waiting)} did not answer within {START_S:g} s; its log is on "
                    "stderr"
                )
            try:
                words = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                raise ServerStartError(
                    "the process that starts servers has ended; stderr says why"
                ) from None
            if wanted not in words:
                reason = words.get("error", "it ended at once; its log is on stderr")
                raise ServerStartError(f"server {words['index']} did not start: {reason}")
            waiting.discard(words["index"])


def _run_supervisor(pipe: Connection, *arguments: Any) -> None:
    from paceline.ps.launch.supervisor import run_supervisor  # brings torch with it

    run_supervisor(pipe, *arguments)


def _end(child: Child, server: ForkServer | None, sockets: Path) -> None:
    child.pipe.close()  # the supervisor reads its end, and ends
    if child.wait(_END_S) is None:
        child.kill()
        child.wait()
    child.close()
    if server is not None:
        server.close()
    shutil.rmtree(sockets, ignore_errors=True)
