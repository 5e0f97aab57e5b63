"""The coordinator's process: what the fork server's child runs. Must not import torch."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from paceline.elastic.coordinator import Coordinator, CoordinatorOrder
from paceline.elastic.protocol import send


def run_coordinator(pipe: Connection, order: CoordinatorOrder) -> int:
    """The whole life of the process: what the fork server's child runs."""
    try:
        coordinator = Coordinator(order)
    except OSError as error:
        with contextlib.suppress(OSError):
            send(pipe, "error", why=error.strerror or str(error))
        return 1
    with contextlib.suppress(OSError):
        send(pipe, "listening")
    try:
        coordinator.run()
    finally:
        coordinator.close()
    return 0
