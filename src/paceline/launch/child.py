"""The owner's handle of a forked child: its order, its life, its end.

Made by :class:`paceline.launch.fork_server.ForkServer`. A child that has got no order waits for
one: that is a spare, at the cost of a fork. Must not know what children do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import PacelineError
from paceline.forks import Owner, tell_children
from paceline.launch.wire import CHILD_ENDED, CHILD_STARTED, GROUP


class ForkServerError(PacelineError, RuntimeError):
    """The process that children are forked from ended before it could start one, or could not."""


class Child:
    """One process, owned by whoever holds this. Not for several threads at once.

    Attributes:
        pipe: To the function that runs in the child; what it says is between the two.
        exit_code: As in subprocess; None while it runs. If the fork server was killed, -SIGKILL:
            the kernel killed the child with it.
        ended_ns: When the fork server saw it end, on the clock ``time.monotonic_ns``; 0 before.
    """

    def __init__(self, control: socket.socket, pipe: Connection) -> None:
        self.pipe = pipe
        self.exit_code: int | None = None
        self.ended_ns = 0
        self._control = control
        self._pid = 0
        self._owner = Owner()
        tell_children(self)

    @property
    def pid(self) -> int:
        """Its process id. Waits until it has one, and raises as :meth:`wait_started` does."""
        self.wait_started()
        return self._pid

    def wait_started(self) -> None:
        """Wait until it has a process id.

        Raises:
            ForkServerError: It never will.
        """
        if not self._pid:
            data = self._receive(CHILD_STARTED.size)
            if not data:
                raise ForkServerError(
                    "the fork server has ended, probably because an import in it failed; its "
                    "stderr says why"
                )
            (self._pid,) = CHILD_STARTED.unpack(data)
        if self._pid < 0:
            raise ForkServerError(
                f"the system refuses another process: {os.strerror(-self._pid)}; look at `ulimit "
                "-u`, the cgroup's pids.max and the memory that is left, or start fewer ranks"
            )

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Give the order: call ``function(pipe, *args)``, importable, and end the process with it.

        A number that it returns is the exit code. If the child is dead, nothing happens here:
        that is seen where its end is.
        """
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps((function, args)))

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended, if :attr:`pid` was asked."""
        return self._control.fileno()

    def is_running(self) -> bool:
        """Say whether it has not ended, as far as the fork server knows."""
        return self.wait(0.0) is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until it has ended and return its exit code; None if the time is over before."""
        if self.exit_code is None and self._control.fileno() >= 0:
            with contextlib.suppress(ForkServerError):
                self.wait_started()
            if not _wait_readable(self._control, timeout_s):
                return None
            data = self._receive(CHILD_ENDED.size)
            ended = CHILD_ENDED.unpack(data) if data else (-signal.SIGKILL, time.monotonic_ns())
            self.exit_code, self.ended_ns = ended
        return self.exit_code

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Signal the process, or with ``group`` all of its process group; nothing if it ended.

        Nothing either in a forked child of the owner.
        """
        if not self._owner.is_here():
            return
        with contextlib.suppress(OSError):
            self._control.send(bytes([number | (GROUP if group else 0)]))

    def kill(self) -> None:
        """Kill the process and its group. Does not wait."""
        self.send_signal(signal.SIGKILL, group=True)

    def close(self) -> None:
        """Let go: if it runs, or left somebody behind, the fork server ends that. Idempotent."""
        self.pipe.close()
        self._control.close()

    def let_go(self) -> None:
        """In a forked child of the owner, which owns nothing."""
        self.close()

    def _receive(self, size: int) -> bytes:
        """A whole message, or nothing if the fork server is gone."""
        data = b""
        with contextlib.suppress(OSError):
            while len(data) < size and (more := self._control.recv(size - len(data))):
                data += more
        return data if len(data) == size else b""


def _wait_readable(control: socket.socket, timeout_s: float | None) -> bool:
    poll = select.poll()  # not select: descriptors may have numbers above 1023
    poll.register(control, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
