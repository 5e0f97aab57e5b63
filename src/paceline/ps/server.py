"""The server's loop: one thread, one ROUTER socket, one message after the other.

Called by ``ps/process.py``. Receives, lets ``ps/handler.py`` answer, sends; and between messages
takes snapshots and looks after forked children. Knows nothing of what messages mean.

[Note: bounded]
A frame has at most ``max_message_bytes``; a message that has more frames than any kind has is
thrown away as it is read; a peer that does not read its replies loses those beyond ``QUEUED``, and
asks again by the protocol. No reply is ever waited for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from paceline.ps.background import Job
from paceline.ps.durable import Durable
from paceline.ps.entrance import Entrance
from paceline.ps.faults import Place, reach
from paceline.ps.handler import Handler, Later
from paceline.ps.refusal import Code, Refusal
from paceline.ps.settings import ServerSettings
from paceline.ps.wire import Frame

log = logging.getLogger("paceline.ps")

QUEUED = 256
"""So many messages wait for one peer, in each direction."""
AT_ONCE = 64
"""So many are handled before timers and signals are looked at, and synced together."""
_FRAMES = 3
_SMALL = 8192  # ZeroMQ packs smaller frames anywhere into a buffer, so they are not aligned
_LINGER_MS = 200
_MOST_JOBS = 16  # saves that wait for one another


class Server:
    """Serves at one address.

    Args:
        settings: Where and how.
        handler: What answers.
        durable: What is snapshotted now and then, or None.

    Raises:
        ServerStartError: The address is taken, or cannot be had.
    """

    def __init__(self, settings: ServerSettings, handler: Handler, durable: Durable | None) -> None:
        self._settings = settings
        self._handler = handler
        self._durable = durable
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Job], None]]] = deque()
        self._job: tuple[Job, Callable[[Job], None]] | None = None
        self._next_snapshot_s = time.monotonic() + settings.snapshot_every_s
        self._context = zmq.Context()
        try:
            self._entrance = Entrance(self._context, settings, handler.refusals)
            self._socket = self._entrance.open(QUEUED)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def run(self, stop_fds: Sequence[int]) -> None:
        """Serve until one of the descriptors has something to read, or its other end is closed.

        Raises:
            ServerStateError: The journal cannot be written any more.
        """
        poller = zmq.Poller()
        for socket in (self._socket, *self._entrance.sockets):
            poller.register(socket, zmq.POLLIN)
        for descriptor in stop_fds:
            poller.register(descriptor, zmq.POLLIN | zmq.POLLERR)
        watched: Job | None = None
        while True:
            ready = dict(poller.poll(self._until_timer_ms()))
            if any(descriptor in ready for descriptor in stop_fds):
                return
            if self._socket in ready:
                self._serve_some()
            if self._entrance.is_news(ready):
                self._entrance.look()
            self._start_snapshot()
            job = self._tend_jobs(watched is not None and watched.fileno() in ready)
            if job is not watched:
                if watched is not None:
                    poller.unregister(watched.fileno())
                if job is not None:
                    poller.register(job.fileno(), zmq.POLLIN)
                watched = job

    def close(self) -> None:
        """Let go of socket and address. Replies that are on their way get a moment."""
        if self._job is not None:
            self._job[0].cancel()
        self._handler.refusals.flush()
        self._socket.close(linger=_LINGER_MS)
        self._entrance.close()
        self._context.term()

    def _serve_some(self) -> None:
        """Handle what has arrived; with ``fsync``, one sync for all of it before any answer."""
        answers: list[tuple[bytes, list[Frame]]] = []
        for _ in range(AT_ONCE):
            try:
                peer, frames = self._receive()
            except zmq.Again:
                break
            answer = self._handler.answer(frames)
            if isinstance(answer, Later):
                self._enqueue(peer, answer)
            elif self._settings.fsync:
                answers.append((peer, answer))
            else:
                self._send(peer, answer)
        if answers and self._durable is not None:
            self._durable.sync()
            for peer, answer in answers:
                self._send(peer, answer)

    def _receive(self) -> tuple[bytes, list[Frame]]:
        socket = self._socket
        peer = socket.recv(zmq.NOBLOCK)
        frames: list[Frame] = []
        more = True
        while more:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= _FRAMES:
                view = frame.buffer
                frames.append(bytearray(view) if len(view) <= _SMALL else view)
        return peer, frames

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
            reach(Place.SENT)
        except zmq.ZMQError:  # it does not read, or is gone
            self._handler.dropped += 1

    def _until_timer_ms(self) -> int | None:
        if not self._settings.snapshot_every_s or self._durable is None:
            return None
        return max(0, int(1000 * (self._next_snapshot_s - time.monotonic())) + 1)

    def _start_snapshot(self) -> None:
        if self._durable is None or not self._settings.snapshot_every_s:
            return
        if time.monotonic() < self._next_snapshot_s:
            return
        self._next_snapshot_s = time.monotonic() + self._settings.snapshot_every_s
        if self._durable.has_changed and self._job is None:
            self._jobs.appendleft((self._durable.begin_snapshot(), self._end_snapshot))

    def _end_snapshot(self, job: Job) -> None:
        assert self._durable is not None
        try:
            job.finish()
        except OSError as error:
            log.warning("a snapshot failed, journals are kept: %s", error)
            return
        self._durable.end_snapshot()

    def _enqueue(self, peer: bytes, later: Later) -> None:
        if len(self._jobs) < _MOST_JOBS:
            self._jobs.append((later.work, self._answer_later(peer, later)))
            self._tend_jobs(is_done=False)  # of this moment, unless another child is at work
            return
        busy = Refusal(Code.SAVE, f"{_MOST_JOBS} saves are waiting already")
        self._send(peer, self._handler.refuse(later.head, busy))

    def _answer_later(self, peer: bytes, later: Later) -> Callable[[Job], None]:
        def end(job: Job) -> None:
            try:
                answer = later.done(job.finish())
            except OSError as error:
                answer = self._handler.refuse(later.head, Refusal(Code.SAVE, str(error)))
            self._send(peer, answer)

        return end

    def _tend_jobs(self, is_done: bool) -> Job | None:
        """End the child that is done, start the next; returns the one at work."""
        if is_done and self._job is not None:
            job, end = self._job
            self._job = None
            end(job)
        if self._job is None and self._jobs:
            work, end = self._jobs.popleft()
            self._job = (Job(work), end)
        return None if self._job is None else self._job[0]
