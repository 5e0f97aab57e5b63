"""Where a server hands out memory to trainers of its host, and the server's end of that memory.

Called by ``ps/server/loop.py``. A Unix socket beside the server's own: who greets with its client
id, and is of the same user, gets a pair of rings. The connection stays; when it ends, the trainer
has left. What messages mean is not known here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

from paceline.memory.descriptors import is_same_user
from paceline.ps.protocol.shm_ring import (
    CAPACITY,
    GREETING,
    MAGIC,
    OFFER,
    RingDescriptors,
    make_memory,
    pair_over,
)
from paceline.ps.protocol.wire import Frame
from paceline.ps.server.descriptors import DescriptorLimit
from paceline.ps.server.private import listen_privately

MOST = 1024
"""So many trainers may have memory, and as many more may stand in the queue."""
GREETING_S = 5.0
"""A client that has been silent for this long is sent away when the next one comes."""
FULL = CAPACITY // 48
"""No more messages than this are in a ring at once."""


class ShmTrainer:
    """One trainer with a pair of rings.

    Attributes:
        client: Who it is.
        pair: The server's end of the rings.
        receive: Its next request: None if there is none. Raises ValueError for garbage.
    """

    def __init__(self, client: bytes, connection: socket.socket, pair: Any, event: int) -> None:
        self.client = client
        self.connection = connection
        self.is_gone = False
        self.receive = pair.receive
        self.prepare_sleep = pair.prepare_sleep
        self.pair = pair
        self._event = event

    def send(self, frames: list[Frame]) -> bool:
        """Put a reply in; False if it does not fit, now or ever."""
        return not self.is_gone and bool(self.pair.send(frames))

    def mark(self) -> bool:
        """Say that the next reply comes over ZeroMQ; False if not even that fits."""
        return not self.is_gone and bool(self.pair.mark())

    def leave(self) -> None:
        """Close everything. Idempotent."""
        if not self.is_gone:
            self.is_gone = True
            self.pair.close()
            self.connection.close()
            os.close(self._event)


class ShmListener:
    """A listening socket and the trainers that have memory from it.

    Args:
        path: Of the socket; a file that a killed server left there is replaced.
        incarnation: Of the server.
        descriptors: Memory is handed out while there are some.

    Attributes:
        event: A descriptor that has something to read when a trainer woke the server.
        trainers: All of them, by client.
    """

    def __init__(self, path: Path, incarnation: str, descriptors: DescriptorLimit) -> None:
        self._path = path
        self._descriptors = descriptors
        self._offer = OFFER.pack(MAGIC, CAPACITY, incarnation.encode())
        self.trainers: dict[bytes, ShmTrainer] = {}
        self._greeting: dict[int, tuple[socket.socket, float]] = {}
        self._listener = listen_privately(path, socket.SOMAXCONN)
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Has something to read when ``look`` has something to do."""
        return self._epoll.fileno()

    def prepare_sleep(self) -> bool:
        """Say that the server will sleep; False if a trainer has a request after all."""
        return all(trainer.prepare_sleep() for trainer in self.trainers.values())

    def clear_event(self) -> None:
        """Forget that it was woken."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)

    def look(self) -> list[ShmTrainer]:
        """Let in who greets; returns those who left. Their last requests are still there."""
        left = []
        by_descriptor = {each.connection.fileno(): each for each in self.trainers.values()}
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._greeting:
                self._let_in(self._greeting.pop(descriptor)[0])
            elif descriptor in by_descriptor:
                left.append(by_descriptor[descriptor])
        return left

    def dismiss(self, trainer: ShmTrainer) -> None:
        """End with a trainer: what is not handled yet is lost, and it notices."""
        if not trainer.is_gone:
            self._epoll.unregister(trainer.connection)
            trainer.leave()
            del self.trainers[trainer.client]

    def close(self) -> None:
        """Let go of everybody, and remove the socket's file."""
        for trainer in list(self.trainers.values()):
            self.dismiss(trainer)
        for each, _ in self._greeting.values():
            each.close()
        self._listener.close()
        self._epoll.close()
        os.close(self.event)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left
            return
        self._send_away()
        is_late = len(self._greeting) >= MOST or not self._descriptors.may_share
        if is_late or not is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._greeting[connection.fileno()] = (connection, time.monotonic())
        self._epoll.register(connection, select.EPOLLIN)

    def _send_away(self) -> None:
        """End with those who came long ago and said nothing."""
        until_s = time.monotonic() - GREETING_S
        for descriptor, (connection, since_s) in list(self._greeting.items()):
            if since_s < until_s:
                self._epoll.unregister(connection)
                connection.close()
                del self._greeting[descriptor]

    def _let_in(self, connection: socket.socket) -> None:
        try:
            words = connection.recv(GREETING.size)
            magic, client = GREETING.unpack(words) if len(words) == GREETING.size else (b"", b"")
            is_late = len(self.trainers) >= MOST or not self._descriptors.may_share
            if magic != MAGIC or client in self.trainers or is_late:
                raise ConnectionError("no word that opens")
            self.trainers[client] = self._hand_out(client, connection)
        except OSError:
            self._epoll.unregister(connection)
            connection.close()

    def _hand_out(self, client: bytes, connection: socket.socket) -> ShmTrainer:
        with contextlib.ExitStack() as undo:
            event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, event)
            memory = make_memory()
            try:
                handed = RingDescriptors(memory, self.event, event)
                pair = pair_over(handed, CAPACITY, is_server=True)
                undo.callback(pair.close)
                socket.send_fds(connection, [self._offer], handed)
            finally:
                os.close(memory)
            undo.pop_all()
        return ShmTrainer(client, connection, pair, event)
