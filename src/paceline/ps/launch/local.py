"""``ps.local``: servers on this host that end with whoever started them. No set-up.

Called by users and tests. The servers are forked by one process of their own
(``ps/launch/supervisor.py``); this file starts it and talks to it. Must not import torch or zmq.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigurationError, ServersClosedError, ServerStartError
from paceline.forks import Owner, finalize_here, tell_children
from paceline.ps.protocol.settings import GIB, ServerSettings

START_S = 60.0
"""So long may servers take to answer, importing torch included."""
_END_S = 15.0
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "paceline.ps.launch.supervisor")


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
    start_method: Literal["spawn", "forkserver"] = "spawn",
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
        start_method: ``"forkserver"`` takes multiprocessing's fork server, which has imported torch
            if it was used before: faster, and the main module needs ``if __name__ ==
            "__main__":``. ``"spawn"`` works everywhere.

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
    if start_method not in _LAUNCHERS:
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
        return LocalServers(settings, sockets, restart, _LAUNCHERS[start_method])
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
        launch: Callable[[bytes], tuple[Connection, Any]],
    ) -> None:
        self.addresses = [each.address for each in settings]
        servers = [dataclasses.asdict(each) for each in settings]
        order = {"restart": restart, "sockets": str(sockets), "servers": servers}
        self._pipe, process = launch(json.dumps(order, default=str).encode())
        self._owner = Owner()
        self._finalizer = finalize_here(self, _end, self._pipe, process, sockets)
        tell_children(self)
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

    def let_go(self) -> None:
        """In a forked child: the supervisor ends when nobody has this end of the pipe any more."""
        self._pipe.close()

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


def _end(pipe: Connection, process: Any, sockets: Path) -> None:
    pipe.close()  # the supervisor reads its end, and ends
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)
    shutil.rmtree(sockets, ignore_errors=True)


def _spawn(order: bytes) -> tuple[Connection, Any]:
    """A new interpreter."""
    pipe, far_end = multiprocessing.Pipe()
    command = [sys.executable, "-m", "paceline.ps.launch.supervisor", str(far_end.fileno())]
    environ = dict(os.environ)
    # Found where we were found, installed or not.
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    with far_end:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
            env=environ,
            start_new_session=True,  # Ctrl-C is for the owner
        )
    with contextlib.suppress(OSError):  # it is dead already: seen at the first answer
        pipe.send_bytes(order)
    return pipe, process


class _ForkServerProcess:
    """A process of multiprocessing, with the two methods of ``Popen`` that are needed."""

    def __init__(self, far_end: Connection, order: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))  # no effect once the fork server runs
        self._process = context.Process(target=_run_supervisor, args=(far_end, order))
        self._process.start()

    def wait(self, timeout_s: float) -> None:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("servers", timeout_s)
        self._process.close()

    def kill(self) -> None:
        self._process.kill()


def _run_supervisor(pipe: Connection, order: bytes) -> None:
    from paceline.ps.launch.supervisor import run_supervisor  # brings torch with it

    run_supervisor(pipe, order)


def _fork_from_server(order: bytes) -> tuple[Connection, Any]:
    pipe, far_end = multiprocessing.Pipe()
    with far_end:
        return pipe, _ForkServerProcess(far_end, order)


_LAUNCHERS: dict[str, Callable[[bytes], tuple[Connection, Any]]] = {
    "spawn": _spawn,
    "forkserver": _fork_from_server,
}
