"""An owner's side of the fork server: starts the process, asks it for children.

Called by ``testing``, ``ps.local`` and ``paceline run``. The process is ``server_process.py``, what
is said ``wire.py``. Must not import torch: an owner need not have it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.forks import Owner, finalize_here, tell_children
from paceline.launch.child import Child, ForkServerError
from paceline.launch.wire import READY, EndPolicy, Request

TORCH = ("torch", "torch.distributed", "torch._dynamo")
"""What children need. torch._dynamo: every first optimizer step imports it, 1 s."""
_END_S = 20.0
_ASK_S = 0.02
# Without the working directory, which -c adds. Found where we were found, installed or not.
_START = (
    "import json, sys; from importlib.util import find_spec; setup = json.loads(sys.argv[1]); "
    "sys.path[:] = setup['path'] or [entry for entry in sys.path if entry]; "
    "find_spec('paceline') or sys.path.append(setup['root']); "
    "from paceline.launch.server_process import main; main(setup)"
)
_ROOT = str(Path(__file__).parents[2])

Streams = tuple[int, int, int]
"""Descriptors of stdin, stdout and stderr."""


class ForkServer:
    """A process that imports modules once and then forks children of this one. A context manager.

    Args:
        preload: Modules that it imports first; it does so while this process goes on.
        environ: Its environment, and that of its children unless they change it.
        path: Its ``sys.path``; None is what a new interpreter has.
        flags: For the interpreter.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        path: Sequence[str] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self._connection, far_end = socket.socketpair()
        setup: dict[str, Any] = {"preload": list(preload), "fd": far_end.fileno()}
        setup |= {"path": path, "root": _ROOT}
        with far_end:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _START, json.dumps(setup)],
                stdin=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
                env=environ,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        self._take(process.pid)
        self._known = _Known()
        self._finalizer = finalize_here(self, _end, self._connection, process, self._known)

    def _take(self, pid: int) -> None:
        self.pid = pid
        self.owner = Owner()
        tell_children(self)

    @classmethod
    def inherited(cls, connection: socket.socket) -> ForkServer:
        """The server that has forked this process, over a connection of its own."""
        server = cls.__new__(cls)
        server._connection = connection
        server._known = _Known()
        server._take(os.getppid())
        server._finalizer = finalize_here(server, connection.close)
        return server

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(
        self,
        end: EndPolicy = EndPolicy(),  # noqa: B008 - frozen
        *,
        may_fork: bool = False,
        streams: Streams | None = None,
    ) -> Child:
        """Ask for a child, which then waits for its order. Does not wait for it.

        Args:
            end: What becomes of it when nobody owns it any more.
            may_fork: :func:`shared_fork_server` in the child is this server.
            streams: Its stdin, stdout and stderr; None gives it this process's.

        Raises:
            ForkServerError: The server has ended. If it ends from now on, ``child.pid`` says so.
        """
        control, far_control = socket.socketpair()
        pipe, far_pipe = multiprocessing.Pipe()
        with far_control, far_pipe, _streams_or_null(streams or (0, 1, 2)) as given:
            descriptors = [far_control.fileno(), far_pipe.fileno(), *given]
            try:
                socket.send_fds(self._connection, [Request(end, may_fork).pack()], descriptors)
            except OSError as error:
                control.close()
                pipe.close()
                raise ForkServerError(f"the fork server has ended: {error.strerror}") from error
        return Child(control, pipe)

    def fileno(self) -> int:
        """Of the connection; readable once, when everything is imported, and when it has ended."""
        return self._connection.fileno()

    def is_alive(self) -> bool:
        """Say whether it still listens."""
        return not self._known.learn(self._connection).has_ended

    def close(self, hurry: Callable[[], bool] | None = None) -> None:
        """End it, and with it all children; waits until they are gone. Idempotent.

        Args:
            hurry: Asked meanwhile, again and again: whether to kill it, and its children with it.
                What these have started then becomes a child of who adopts orphans.
        """
        self._known.hurry = hurry
        self._finalizer()

    def let_go(self) -> None:
        """In a forked child of the owner."""
        self._connection.close()


@dataclass
class _Known:
    """What the owner knows of the server, and of its own end.

    Attributes:
        is_ready: It has imported everything; before that it has forked nothing.
        has_ended: Nobody is at the other end.
        hurry: See :meth:`ForkServer.close`.
    """

    is_ready: bool = False
    has_ended: bool = False
    hurry: Callable[[], bool] | None = None

    def learn(self, connection: socket.socket) -> _Known:
        """Take what it has said."""
        try:
            while data := connection.recv(1, socket.MSG_DONTWAIT):
                self.is_ready |= data == READY
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        return self


def _end(connection: socket.socket, process: subprocess.Popen[Any], known: _Known) -> None:
    is_ready = known.learn(connection).is_ready
    connection.close()  # the server reads its end, ends its children, and then itself
    if not is_ready:
        process.kill()  # it imports, may do so for long, and has forked nothing
    until_s = time.monotonic() + _END_S
    while process.poll() is None:
        if time.monotonic() > until_s or (known.hurry is not None and known.hurry()):
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S if known.hurry is None else _ASK_S)


@contextlib.contextmanager
def _streams_or_null(numbers: Sequence[int]) -> Iterator[list[int]]:
    """The same descriptors, but /dev/null for those that are closed."""
    with Path(os.devnull).open("r+b", buffering=0) as null:
        yield [number if _is_open(number) else null.fileno() for number in numbers]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_shared: ForkServer | None = None
_lock = threading.Lock()


def shared_fork_server(preload: Sequence[str] = ()) -> ForkServer:
    """The fork server of this process, for whoever needs children here.

    Args:
        preload: What it imports on top of torch; no effect if it runs already.
    """
    global _shared
    with _lock:
        if _shared is None or not _shared.owner.is_here() or not _shared.is_alive():
            # With the owner's path: a child imports what the owner could.
            _shared = ForkServer([*TORCH, *preload], path=sys.path)
        return _shared


def inherit_fork_server(connection: socket.socket) -> None:
    """In a child: :func:`shared_fork_server` is the server that this process comes from."""
    global _shared
    _shared = ForkServer.inherited(connection)
