"""One process that has imported torch and forks servers, for ``ps.local``.

Started by ``ps/launch/local.py``, which talks to it over a pipe: JSON in both directions. Importing
torch takes more than a second; a fork takes milliseconds, so n servers start, and a killed one
comes back, as fast as one. When the owner's end of the pipe closes, all servers end, and then this
process. Must not open a ZeroMQ context: a fork would inherit it.

[Note: two pipes for each server]
Its *life* pipe has its first words (an address, or why it could not start), and then stays open:
end of file means that it is dead. Its *owner* pipe is held by this process: a server that reads its
end ends. So neither outlives the other unnoticed, however it was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.process import serve, set_up_logging

log = logging.getLogger("paceline.ps")

END_S = 10.0
"""So long has a server to take its last snapshot."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 5.0
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 0)


@dataclass
class Child:
    """A server that runs."""

    pid: int
    life: Connection
    owner: Connection
    address: str = ""


class Supervisor:
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
        self._children: dict[int, Child] = {}
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
        lives = {child.life: index for index, child in self._children.items()}
        ready = wait([self._pipe, *lives], self._until_next())
        for life in ready:
            if life is not self._pipe:
                self._hear(lives[life])  # type: ignore[index]
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
        child = self._children.get(index)
        if order["do"] == "kill":
            self._asked.add(index)
            if child is None:
                self._tell(index, {"died": 0})
            else:
                os.kill(child.pid, signal.SIGKILL)
        elif child is None:
            self._asked.add(index)
            self._again_at_s.pop(index, None)
            self._start(index)
        elif child.address:
            self._asked.add(index)
            self._tell(index, {"address": child.address})
        else:
            self._asked.add(index)  # it is on its way
        return True

    def _start(self, index: int) -> None:
        life, far_life = _pipe()
        far_owner, owner = _pipe()
        pid = os.fork()
        if pid == 0:
            _be_server(self._settings[index], far_life.fileno(), far_owner.fileno())
        far_life.close()
        far_owner.close()
        self._children[index] = Child(pid, life, owner)

    def _hear(self, index: int) -> None:
        """A server has said its first words, or is dead."""
        child = self._children[index]
        try:
            words = json.loads(child.life.recv_bytes())
            if "error" in words and index not in self._asked:
                what = "has ended" if child.address else "did not start"
                log.error("server %d %s: %s", index, what, words["error"])
            child.address = words.get("address", "")
        except (EOFError, OSError):
            words = {"died": _reap(child)}
            self._let_go(index)
            if self._restart:
                self._restart_later(index, by_itself=words["died"] not in _FROM_OUTSIDE)
        self._tell(index, {"pid": child.pid, **words})

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

    def _let_go(self, index: int) -> None:
        child = self._children.pop(index)
        child.life.close()
        child.owner.close()

    def _end_all(self) -> None:
        for child in self._children.values():
            child.owner.close()
        until_s = time.monotonic() + END_S
        for child in self._children.values():
            with contextlib.suppress(EOFError, OSError):
                while child.life.poll(max(0.0, until_s - time.monotonic())):
                    child.life.recv_bytes()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            _reap(child)
            child.life.close()


def _be_server(settings: ServerSettings, life_fd: int, owner_fd: int) -> None:
    """The life of a forked server. Does not return."""
    code = 1
    try:
        _close_others(life_fd, owner_fd)
        life = Connection(life_fd)
        try:
            serve(
                settings,
                lambda address: life.send_bytes(json.dumps({"address": address}).encode()),
                owner_fd,
                ignore_interrupt=True,
            )
            code = 0
        except PacelineError as error:
            life.send_bytes(json.dumps({"error": str(error)}).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _close_others(*keep: int) -> None:
    """Close what belongs to the supervisor and to other servers."""
    start = 3
    for descriptor in sorted(keep):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _pipe() -> tuple[Connection, Connection]:
    reader, writer = os.pipe()
    return Connection(reader, writable=False), Connection(writer, readable=False)


def _reap(child: Child) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    except ChildProcessError:
        return 0


def run_supervisor(pipe: Connection, order: bytes) -> None:
    """The whole life of the process; ``order`` is JSON from ``ps/launch/local.py``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging()
    found = json.loads(order)
    settings = [_settings(fields) for fields in found["servers"]]
    try:
        Supervisor(pipe, settings, found["restart"]).run()
    finally:
        # The owner does so as well, unless it was killed.
        shutil.rmtree(found["sockets"], ignore_errors=True)


def _settings(fields: dict[str, Any]) -> ServerSettings:
    for name in ("directory", "keys", "save_root"):
        if fields.get(name) is not None:
            fields[name] = Path(fields[name])
    return ServerSettings(**fields)


def main() -> None:
    """Entry of ``python -m paceline.ps.launch.supervisor FD``; the first message is the order."""
    pipe = Connection(int(sys.argv[1]))
    run_supervisor(pipe, pipe.recv_bytes())
    sys.stderr.flush()
    os._exit(0)  # to take torch down takes half a second, which the owner would wait for


if __name__ == "__main__":
    main()
