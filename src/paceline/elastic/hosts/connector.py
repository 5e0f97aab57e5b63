"""Connects a launcher to the coordinator, again and again, beside the launcher's loop.

Used by :mod:`paceline.elastic.hosts.link`. One thread at a time, only while nothing is connected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from paceline.elastic.handshake import connect
from paceline.elastic.hosts.lease import now_s
from paceline.errors import MembershipError

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5


class Connector:
    """Tries until it has a connection.

    Args:
        address: Of the coordinator: a path, or a host and a port.
        key: Of the job.
        timeout_s: For one attempt.
        on_connected: Gets the connection. In the thread, as the next two.
        on_refused: Gets the moment at which an attempt began to which nobody listened.
        on_failed: Gets what was wrong, if the other end is not of this job.
    """

    def __init__(
        self,
        address: str | tuple[str, int],
        key: bytes,
        timeout_s: float,
        on_connected: Callable[[Connection], None],
        on_refused: Callable[[float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._address, self._key, self._timeout_s = address, key, timeout_s
        self._on_connected, self._on_refused = on_connected, on_refused
        self._on_failed = on_failed
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, is_soon: bool = True) -> None:
        """Begin to try, soon or after a pause; not while it tries already."""
        if self._thread is not None:
            self._thread.join()
        pause_s = _FIRST_PAUSE_S if is_soon else _MAX_PAUSE_S
        run = partial(self._run, pause_s)
        self._thread = threading.Thread(target=run, name="paceline-connect", daemon=True)
        self._thread.start()

    def _run(self, pause_s: float) -> None:
        while not self._closed.wait(pause_s):
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            began_s = now_s()
            try:
                pipe = connect(self._address, self._key, self._timeout_s)
            except (ConnectionRefusedError, FileNotFoundError):
                self._on_refused(began_s)
            except MembershipError as error:
                self._on_failed(str(error))
            except (OSError, EOFError):
                pass  # silence: nothing is known
            else:
                self._on_connected(pipe)
                return

    def close(self) -> None:
        """Try no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
