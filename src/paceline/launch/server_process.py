"""The fork server's own process: imports modules, then forks a child for each request.

Started by :class:`paceline.launch.fork_server.ForkServer`, with ``wire.py`` between them. Has one
thread and no state besides its children, so that a fork of it is a fresh interpreter with torch
imported. Must not know what children do.

[Note: who ends whom]
The root owner starts the server and holds the first connection; children that may fork hold others.
A child ends with its owner: when the owner's end of its control socket closes, or when the root
owner's process has ended (a copy of the socket in a process that C code forked does not count).
The server ends when no connection and no child is left. If it is killed, the kernel kills its
children. Each child leads a session, and what leaves that session and loses its parent becomes a
child of the server: so the server can end all that came from it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from paceline.launch.fork_server import inherit_fork_server
from paceline.launch.kernel import (
    adopt_orphans,
    descendants,
    die_with_parent,
    pidfd_or_none,
)
from paceline.launch.wire import (
    CHILD_ENDED,
    CHILD_STARTED,
    DESCRIPTORS,
    GROUP,
    READY,
    REQUEST_BYTES,
    Request,
)
from paceline.memory.descriptors import close_all, receive

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # meant for the owner, who decides
_LOOK_AGAIN_S = 0.05


@dataclass(eq=False)
class Forked:
    """A child of the server, until it has ended and nobody owns it.

    Attributes:
        control: To the owner; None once the owner has let go.
        connection: Over which it was asked for; None for those of an owner that is gone.
        kill_at_s: When what is left of its family is killed; None while it has an owner.
        family: Descendants that were seen while it lived and had no owner.
    """

    pid: int
    request: Request
    control: socket.socket | None
    connection: socket.socket
    kill_at_s: float | None = None
    is_alive: bool = True
    family: set[int] = field(default_factory=set)

    def signal(self, number: int, *, group: bool) -> None:
        """Signal it or its group, as long as it has not been waited for: its id is its own."""
        if not self.is_alive:
            return
        with contextlib.suppress(PermissionError):
            try:
                (os.killpg if group else os.kill)(self.pid, number)
            except ProcessLookupError:  # it has not come so far as to lead a group
                os.kill(self.pid, number)

    def left(self) -> set[int]:
        """It, its session, and descendants in other sessions, as far as they live.

        Descendants of the server only: ids are used again.
        """
        if self.is_alive:
            self.family |= descendants(self.pid) | {self.pid}
        ours = descendants(os.getpid())
        return (self.family & ours) | descendants(os.getpid(), session=self.pid)


class ForkLoop:
    """Hears owners and children until none is left."""

    def __init__(self, root: socket.socket) -> None:
        self._root = root
        self._connections = {root}
        self._children: dict[int, Forked] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(root, selectors.EVENT_READ, self._hear_owner)
        self._wakeup, far_end = socket.socketpair()
        self._signal_end = far_end
        self._watch_children()
        self._root_pidfd = self._watch_root()

    def run(self) -> tuple[Connection, socket.socket | None] | None:
        """Serve. In a child, return its pipe, and its connection if it may fork; else None."""
        while self._connections or self._children:
            for key, _ in self._selector.select(self._until_next()):
                # What was heard before may have closed it.
                is_open = self._selector.get_map().get(key.fd) == key
                if is_open and (child := key.data(key.fileobj)):
                    return child  # type: ignore[no-any-return]
            self._end_orphans()
        while left := descendants(os.getpid()):
            _kill(left)
            time.sleep(_LOOK_AGAIN_S / 10)
        return None

    def _watch_children(self) -> None:
        for end in (self._wakeup, self._signal_end):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signal_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)

    def _watch_root(self) -> int | None:
        owner = os.getppid()
        pidfd = pidfd_or_none(owner)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, self._root_has_ended)
            if os.getppid() != owner:
                self._root_has_ended(pidfd)
        return pidfd

    # --- owners ----------------------------------------------------------------------------------

    def _hear_owner(self, connection: socket.socket) -> Any:
        descriptors: list[int] = []
        data = b""
        with contextlib.suppress(OSError):
            data, descriptors = receive(connection, REQUEST_BYTES, DESCRIPTORS)
        if len(data) < REQUEST_BYTES or len(descriptors) < DESCRIPTORS:
            close_all(descriptors)
            self._lose(connection)
            return None
        return self._fork(Request.unpack(data), connection, descriptors)

    def _root_has_ended(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        for child in list(self._children.values()):
            if child.connection is self._root:
                self._orphan(child)
        self._lose(self._root)

    def _lose(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    # --- children --------------------------------------------------------------------------------

    def _fork(self, request: Request, connection: socket.socket, descriptors: list[int]) -> Any:
        control, pipe, *streams = descriptors
        near, far = socket.socketpair() if request.may_fork else (None, None)
        server = os.getpid()
        # A signal that comes before the child takes signals as others do must wait, not be ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._let_go()
            os.close(control)
            if near is not None:
                near.close()
            _become_child(server, streams)
            return Connection(pipe), far
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        for descriptor in (pipe, *streams):
            os.close(descriptor)
        if pid < 0:
            with socket.socket(fileno=control) as refused:
                _send(refused, CHILD_STARTED.pack(pid))
            for end in (near, far):
                if end is not None:
                    end.close()
            return None
        if near is not None and far is not None:
            far.close()
            self._connections.add(near)
            self._selector.register(near, selectors.EVENT_READ, self._hear_owner)
        self._add(Forked(pid, request, socket.socket(fileno=control), connection))
        return None

    def _add(self, child: Forked) -> None:
        assert child.control is not None
        self._children[child.pid] = child
        _send(child.control, CHILD_STARTED.pack(child.pid))
        hear: Callable[[Any], None] = lambda _: self._hear_about(child)  # noqa: E731
        self._selector.register(child.control, selectors.EVENT_READ, hear)

    def _hear_about(self, child: Forked) -> None:
        """The child's owner wants it signalled, or is gone."""
        assert child.control is not None
        try:
            numbers = child.control.recv(64)
        except OSError:
            numbers = b""
        for number in numbers:
            child.signal(number & ~GROUP, group=bool(number & GROUP))
        if not numbers:
            self._orphan(child)

    def _orphan(self, child: Forked) -> None:
        if child.control is not None:
            self._selector.unregister(child.control)
            child.control.close()
            child.control = None
            left = child.left()  # before they lose their parent
            policy = child.request.end
            if policy.first is not None and child.is_alive:
                child.signal(policy.first, group=True)
            elif policy.first is not None:
                _signal(left, policy.first)
            child.kill_at_s = time.monotonic() + policy.grace_s

    def _reap(self, wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wakeup.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.get(found[0])
                if child is not None:  # else an orphan of a child
                    child.is_alive = False
                    if child.control is not None:
                        code = os.waitstatus_to_exitcode(found[1])
                        _send(child.control, CHILD_ENDED.pack(code, time.monotonic_ns()))

    def _until_next(self) -> float | None:
        times = [c.kill_at_s for c in self._children.values() if c.kill_at_s is not None]
        if not times:
            return None
        # Members of a session that are no children of ours end unheard.
        return max(_LOOK_AGAIN_S / 10, min(_LOOK_AGAIN_S, min(times) - time.monotonic()))

    def _end_orphans(self) -> None:
        for child in [c for c in self._children.values() if c.kill_at_s is not None]:
            left = child.left()
            if child.kill_at_s is not None and time.monotonic() >= child.kill_at_s:
                _kill(left)
            if not left and not child.is_alive:
                del self._children[child.pid]

    def _let_go(self) -> None:
        """In a child: what belongs to the server and to its other children."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        if self._root_pidfd is not None:
            os.close(self._root_pidfd)
        controls = [c.control for c in self._children.values() if c.control is not None]
        for end in (*self._connections, *controls, self._wakeup, self._signal_end):
            end.close()


def _become_child(server: int, streams: list[int]) -> None:
    """From a fork of the server to a process as any other."""
    os.setsid()
    die_with_parent(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    if "numpy.random" in sys.modules:  # Python's own generator and torch's see to it themselves
        sys.modules["numpy.random"].seed()


def _run_order(pipe: Connection) -> int:
    """In a child: wait for the order, and do it."""
    try:
        order = pipe.recv_bytes()
    except (EOFError, OSError):
        return 0  # a spare that was not needed
    function, args = pickle.loads(order)
    result = function(pipe, *args)
    return result if isinstance(result, int) else 0


def _send(control: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the owner is gone, which is seen where it is read
        control.send(data)


def _kill(pids: set[int]) -> None:
    _signal(pids, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main(setup: dict[str, Any]) -> NoReturn:
    """The whole life of the process, and of every child that is forked from it."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for name in setup["preload"]:
        importlib.import_module(name)
    adopt_orphans()
    # A rank shares this memory until something writes to it. A garbage collection would walk, and
    # so copy, every object of torch: 0.1 s and more in each rank.
    gc.collect()
    gc.freeze()
    root = socket.socket(fileno=setup["fd"])
    _send(root, READY)  # from now on it may have children, and is not just killed
    child = ForkLoop(root).run()
    if child is None:
        os._exit(0)  # to take torch down takes half a second
    pipe, connection = child
    if connection is not None:
        inherit_fork_server(connection)
    if "triton" in sys.modules:
        # What is frozen is never collected, and Triton prints each such object as a leak.
        atexit.register(gc.unfreeze)
    sys.exit(_run_order(pipe))
