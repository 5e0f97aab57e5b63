"""A server as a process, from its settings to its end.

Called by ``paceline ps serve`` and, after a fork, by ``ps/launch/supervisor.py``. Sets up signals
and logging, brings back what is on disk, serves, and leaves nothing behind: SIGTERM, SIGINT and the
end of the owner are a clean end.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import torch

from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.server.dispatch import Handler
from paceline.ps.server.loop import Server
from paceline.ps.server.private import private_umask
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable

log = logging.getLogger("paceline.ps")


def serve(
    settings: ServerSettings,
    ready: Callable[[str], None],
    owner_fd: int | None = None,
    ignore_interrupt: bool = False,
) -> None:
    """Run a server until it is told to end.

    Args:
        settings: How.
        ready: Called with the address once it answers there.
        owner_fd: When its other end closes, the server ends.
        ignore_interrupt: Ctrl-C is for the owner.

    Raises:
        PacelineError: It cannot start; the text says why.
    """
    # Rows are updated in one thread: more would only take cores from trainers, and the order of
    # additions is part of the promise.
    torch.set_num_threads(1)
    with _stop_signals(ignore_interrupt) as stop_fd, contextlib.ExitStack() as stack:
        stack.enter_context(private_umask())  # of everything that is written from now on
        store = Store(settings.max_bytes, settings.max_message_bytes)
        durable = None
        if settings.directory is not None:
            durable = Durable(settings.directory, store, settings.fsync)
            stack.callback(durable.close)
        place = SaveRoot(settings.allowed_save_root)
        server = Server(settings, Handler(store, durable, place), durable)
        stack.callback(server.close)
        ready(server.address)
        server.run([stop_fd] if owner_fd is None else [stop_fd, owner_fd])


def set_up_logging() -> None:
    """One line for each event, on stderr."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"
    )


def run_here(settings: ServerSettings) -> int:
    """Run a server in this process, saying where it is and that it has ended.

    Raises:
        PacelineError: It cannot start, or cannot go on.
    """
    set_up_logging()
    serve(settings, lambda address: print(f"paceline ps: serving at {address}", flush=True))
    print("paceline ps: ended", flush=True)
    return 0


@contextlib.contextmanager
def _stop_signals(ignore_interrupt: bool) -> Iterator[int]:
    """A descriptor that has something to read once SIGTERM or SIGINT came."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before_fd = signal.set_wakeup_fd(writer.fileno())
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _noted),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupt else _noted),
    }
    try:
        yield reader.fileno()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        reader.close()
        writer.close()


def _noted(number: int, frame: object) -> None:
    """The wake-up descriptor has it."""
