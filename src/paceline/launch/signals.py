"""Signals of the launcher, as bytes on a socket: its loop reads them when it has the time.

Used by ``job.py``.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def signals_heard() -> Iterator[socket.socket]:
    """Have the numbers of signals written to the socket that this returns; it does not block."""
    reader, writer = socket.socketpair()
    before = {number: signal.getsignal(number) for number in HANDLED}
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        for number in HANDLED:
            if before[number] is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        old = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
