"""The part of a server's loop that needs no Python: native messages, from ring to ring.

Called by ``ps/server/loop.py`` where it would wait. ``native/ps/loop.c`` answers what it can and
returns when there is something for Python; what it cannot answer is still in the ring then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.ps.server.shm_listener import ShmListener, ShmTrainer
from paceline.ps.state.clients import Clients
from paceline.ps.state.native_messages import Append, NativeMessages
from paceline.ps.storage import faults


class NativeLoop:
    """Answers the trainers of one server that are in shared memory.

    Args:
        clients: Of the server.
        messages: What answers.
        append: Journals a push before it is applied, or None.
    """

    def __init__(self, clients: Clients, messages: NativeMessages, append: Append | None) -> None:
        self._clients = clients
        self._messages = messages
        self._append = append
        self._reach: Callable[[str], None] | None = None if faults.hook is None else _reach
        self._pairs: list[Any] = []
        self._accounts: list[bytearray] = []
        self._trainers: list[ShmTrainer] = []

    def run(self, listener: ShmListener, fds: list[int], timeout_ms: int) -> None:
        """Answer until Python is needed, one of ``fds`` has something, or the time is over.

        Raises:
            ServerStateError: The journal cannot be written: the server has to end.
        """
        if self._trainers != list(listener.trainers.values()):  # a client may come again
            self._meet(listener)
        self._messages.run(
            *(self._pairs, self._accounts, self._append, self._reach),
            *(listener.event, fds, timeout_ms),
        )

    def _meet(self, listener: ShmListener) -> None:
        """Trainers have come or gone."""
        for trainer in self._trainers:
            if trainer.client not in listener.trainers:
                self._clients.unpin(trainer.client)
        self._trainers = list(listener.trainers.values())
        self._accounts = [self._clients.pin(trainer.client) for trainer in self._trainers]
        self._pairs = [trainer.pair for trainer in self._trainers]


def _reach(name: str) -> None:
    faults.reach(faults.FaultPoint[name])
