"""One process that starts, watches and restarts servers, for ``ps.local``.

A child of a fork server (:mod:`paceline.launch`), which has torch imported and forks the servers
too: n servers start, and a killed one comes back, as fast as one. ``ps/launch/local.py`` talks to
it over its pipe: JSON in both directions. When the owner's end of the pipe closes, all servers end,
and then this process.

A server says its first words over its pipe (an address, or why it could not start), and then holds
it: when it reads its end, it ends. So it does not outlive this process, however that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.child import Child
from paceline.launch.exits import leave
from paceline.launch.fork_server import ForkServer, shared_fork_server
from paceline.launch.wire import EndPolicy
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.process import serve, set_up_logging

log = logging.getLogger("paceline.ps")

END_S = 10.0
"""How long a server has to take its last snapshot."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 5.0
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 0)


@dataclass
class RunningServer:
    """A server that runs."""

    child: Child
    address: str = ""


class ServerSupervisor:
    """Starts, watches and ends servers.

    Args:
        pipe: To the owner.
        settings: One for each server.
        restart: Start a server again that dies by itself.
    """

    def __init__(self, pipe: Connection, settings: list[ServerSettings], restart: bool) -> None:
        self._pipe = pipe
        self._settings = settings
        self._restart = restart
        self._fork_server: ForkServer = shared_fork_server()
        self._servers: dict[int, RunningServer] = {}
        self._asked: set[int] = set()  # orders that were not answered yet
        self._again_at_s: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}

    def run(self) -> None:
        """Do what the owner says until it is gone; then end all servers."""
        try:
            while self._wait_once():
                pass
        finally:
            self._end_all()

    def _wait_once(self) -> bool:
        signs: dict[Any, int] = {}
        for index, server in self._servers.items():
            signs |= {server.child.pipe: index, server.child.sentinel: index}
        ready = wait([self._pipe, *signs], self._until_next())
        for index in {signs[sign] for sign in ready if sign is not self._pipe}:
            self._hear(index)
        for index in [i for i, at_s in self._again_at_s.items() if time.monotonic() >= at_s]:
            del self._again_at_s[index]
            self._start(index)
        return self._obey() if self._pipe in ready else True

    def _until_next(self) -> float | None:
        if not self._again_at_s:
            return None
        return max(0.0, min(self._again_at_s.values()) - time.monotonic())

    def _obey(self) -> bool:
        try:
            order = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return False
        index = order["index"]
        server = self._servers.get(index)
        self._asked.add(index)
        if order["do"] == "kill":
            if server is None:
                self._tell(index, {"died": 0})
            else:
                server.child.send_signal(signal.SIGKILL)
        elif server is None:
            self._again_at_s.pop(index, None)
            self._start(index)
        elif server.address:  # else it is on its way
            self._tell(index, {"address": server.address})
        return True

    def _start(self, index: int) -> None:
        child = self._fork_server.fork(EndPolicy(first=None, grace_s=END_S))
        child.run(run_server, self._settings[index])
        assert child.pid
        self._servers[index] = RunningServer(child)

    def _hear(self, index: int) -> None:
        """A server has said its first words, or is dead."""
        server = self._servers[index]
        words: dict[str, Any] = {"pid": server.child.pid}
        try:
            if not server.child.pipe.poll():
                raise EOFError  # a child of its own holds the pipe
            words |= json.loads(server.child.pipe.recv_bytes())
            if "error" in words and index not in self._asked:
                what = "has ended" if server.address else "did not start"
                log.error("server %d %s: %s", index, what, words["error"])
            server.address = words.get("address", "")
        except (EOFError, OSError):
            words["died"] = server.child.wait()
            del self._servers[index]
            server.child.close()
            if self._restart:
                self._restart_later(index, by_itself=words["died"] not in _FROM_OUTSIDE)
        self._tell(index, words)

    def _restart_later(self, index: int, by_itself: bool) -> None:
        """At once if somebody killed it; a server that fails by itself is tried less and less."""
        pause_s = self._pause_s.get(index, _FIRST_PAUSE_S) if by_itself else _FIRST_PAUSE_S
        self._pause_s[index] = min(_LONGEST_PAUSE_S, 2 * pause_s)
        self._again_at_s[index] = time.monotonic() + pause_s

    def _tell(self, index: int, words: dict[str, Any]) -> None:
        """Answer the owner's last order for this server, if it has not been answered.

        What nobody asked for is not sent: nobody would read it, and a full pipe would stop us.
        """
        if index in self._asked:
            self._asked.remove(index)
            with contextlib.suppress(OSError):  # the owner is gone, which is seen where it is read
                self._pipe.send_bytes(json.dumps({"index": index, **words}).encode())

    def _end_all(self) -> None:
        children = [server.child for server in self._servers.values()]
        for child in children:
            child.pipe.close()
        until_s = time.monotonic() + END_S
        for child in children:
            if child.wait(until_s - time.monotonic()) is None:
                child.kill()
                child.wait()
            child.close()


def run_server(pipe: Connection, settings: ServerSettings) -> None:
    """The life of a server."""
    set_up_logging()
    try:
        serve(
            settings,
            lambda address: pipe.send_bytes(json.dumps({"address": address}).encode()),
            pipe.fileno(),
            ignore_interrupt=True,
        )
    except PacelineError as error:
        pipe.send_bytes(json.dumps({"error": str(error)}).encode())
        leave(1)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def run_supervisor(
    pipe: Connection, settings: list[ServerSettings], restart: bool, sockets: Path
) -> None:
    """The whole life of the process; ``sockets`` is the servers' directory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging()
    try:
        ServerSupervisor(pipe, settings, restart).run()
    finally:
        # The owner does so as well, unless it was killed.
        shutil.rmtree(sockets, ignore_errors=True)
    leave(0)
