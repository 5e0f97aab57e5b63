"""The server's loop: one thread, one ROUTER socket, shared memory, one message after the other.

Called by ``ps/server/process.py``. Receives, lets ``ps/server/dispatch.py`` answer, sends; and
between messages takes snapshots and looks after forked children. Knows nothing of what messages
mean.

[Note: bounded]
A frame has at most ``max_message_bytes``; a message that has more frames than any kind has is
thrown away as it is read; a peer that does not read its replies loses those beyond ``QUEUED``, or
its shared memory, and asks again by the protocol. No reply is ever waited for.

[Note: two ways, one order]
``ps/client/link.py`` has the trainer's half. Here: what a trainer has put into its shared memory is
handled before what it sends over ZeroMQ, and each request is answered the way it came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.shm_ring import CAPACITY, is_possible, shm_listener_path
from paceline.ps.protocol.wire import Frame, Kind, WireError, read_head
from paceline.ps.server.descriptors import DescriptorLimit, raise_descriptor_limit
from paceline.ps.server.dispatch import DeferredReply, Handler
from paceline.ps.server.forked_job import ForkedJob
from paceline.ps.server.job_queue import Jobs
from paceline.ps.server.native_loop import NativeLoop
from paceline.ps.server.shm_listener import FULL, MOST, ShmListener, ShmTrainer
from paceline.ps.server.zmq_socket import AGAIN_MS, ServerSocket
from paceline.ps.state.refusal import Refusal
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.faults import FaultPoint, reach

log = logging.getLogger("paceline.ps")

QUEUED = 256
"""So many messages wait for one peer, in each direction."""
AT_ONCE = 64
"""So many are handled before timers and signals are looked at, and synced together."""
_FRAMES = 3
_SMALL = 8192  # ZeroMQ packs smaller frames anywhere into a buffer, so they are not aligned
_LINGER_MS = 200


To = bytes | ShmTrainer
"""Where an answer goes: a peer of the ROUTER socket, or somebody with shared memory."""
Answers = list[tuple[To, list[Frame]]]


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
        self._poller = zmq.Poller()
        self._jobs = Jobs(self._poller)
        self._next_snapshot_s = time.monotonic() + settings.snapshot_every_s
        self._routes: dict[bytes, bytes] = {}  # for each client its ZeroMQ peer
        self._context = zmq.Context()
        try:
            descriptors = raise_descriptor_limit()
            self._server_socket = ServerSocket(
                self._context, settings, handler.refusals, descriptors
            )
            self._socket = self._server_socket.open(QUEUED)
            self._listener = _open_listener(settings, handler.incarnation, descriptors)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._native: NativeLoop | None = None
        store = handler.store
        # With fsync, its answers would overtake those that wait for it.
        if self._listener is not None and store.native_messages is not None and not settings.fsync:
            self._native = NativeLoop(store.clients, store.native_messages, handler.append)
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def run(self, stop_fds: Sequence[int]) -> None:
        """Serve until one of the descriptors has something to read, or its other end is closed.

        Raises:
            ServerStateError: The journal cannot be written any more.
        """
        self._watch(stop_fds)
        while True:
            ready = self._wait(stop_fds)
            if any(descriptor in ready for descriptor in stop_fds):
                return
            if self._listener is not None:
                self._serve_trainers(self._listener, ready)
            if self._socket in ready:
                self._serve_some()
            if self._server_socket.has_messages(ready) or self._server_socket.is_shut:
                self._server_socket.look()
            self._start_snapshot()
            self._jobs.tend(ready)

    def _wait(self, stop_fds: Sequence[int]) -> dict[Any, int]:
        """What is ready. Native messages in shared memory are answered while there is nothing."""
        timeout_ms = self._until_timer_ms()
        if self._native is None or self._listener is None:
            return dict(self._poller.poll(timeout_ms))
        ready = dict(self._poller.poll(0))
        if not ready:
            # A ZeroMQ socket's descriptor tells of what comes after its events were looked at.
            sockets = [self._socket, *self._server_socket.sockets]
            fds = [*(each.getsockopt(zmq.FD) for each in sockets), *stop_fds, *self._jobs.fds]
            timeout_ms = -1 if timeout_ms is None else timeout_ms
            self._native.run(self._listener, [*fds, self._listener.fileno()], timeout_ms)
            ready = dict(self._poller.poll(0))
        return ready

    def _watch(self, stop_fds: Sequence[int]) -> None:
        for socket in (self._socket, *self._server_socket.sockets):
            self._poller.register(socket, zmq.POLLIN)
        for descriptor in stop_fds:
            self._poller.register(descriptor, zmq.POLLIN | zmq.POLLERR)
        if self._listener is not None:
            self._poller.register(self._listener.event, zmq.POLLIN)
            self._poller.register(self._listener.fileno(), zmq.POLLIN)

    def close(self) -> None:
        """Let go of socket and address. Replies that are on their way get a moment."""
        self._jobs.cancel()
        self._handler.refusals.flush()
        if self._listener is not None:
            self._listener.close()
        self._socket.close(linger=_LINGER_MS)
        self._server_socket.close()
        self._context.term()

    def _serve_trainers(self, listener: ShmListener, ready: Mapping[Any, int]) -> None:
        """Handle what is in shared memory, and who comes and goes."""
        if listener.event in ready:
            listener.clear_event()
        answers: Answers = []
        for trainer in list(listener.trainers.values()):
            self._answer_trainer(listener, trainer, answers)
        if listener.fileno() in ready:
            for trainer in listener.look():
                self._answer_trainer(listener, trainer, answers, FULL)
                listener.dismiss(trainer)
        self._send_all(answers)

    def _answer_trainer(
        self, listener: ShmListener, trainer: ShmTrainer, answers: Answers, most: int = AT_ONCE
    ) -> None:
        """Handle what one trainer has asked."""
        for _ in range(most):
            if trainer.is_gone:
                return
            try:
                frames = trainer.receive()
            except ValueError as error:
                self._handler.refusals.add(f"refused shared memory: {error}")
                listener.dismiss(trainer)
                return
            if not frames:
                return
            self._handle(trainer, frames, answers)

    def _serve_some(self) -> None:
        """Handle what has arrived over ZeroMQ."""
        answers: Answers = []
        for _ in range(AT_ONCE):
            try:
                peer, frames = self._receive()
            except zmq.Again:
                break
            if self._listener is not None:
                self._serve_before(self._listener, peer, frames, answers)
            self._handle(peer, frames, answers)
        self._send_all(answers)

    def _serve_before(
        self, listener: ShmListener, peer: bytes, frames: list[Frame], answers: Answers
    ) -> None:
        """Handle what the sender of this message has put into shared memory before it."""
        try:
            head, _ = read_head(frames[0])
        except (WireError, IndexError):
            return
        if head.kind is Kind.HELLO:
            self._routes[head.client] = peer
            if len(self._routes) > MOST:
                del self._routes[next(iter(self._routes))]
        trainer = listener.trainers.get(head.client)
        if trainer is not None:
            self._answer_trainer(listener, trainer, answers, FULL)

    def _handle(self, to: To, frames: list[Frame], answers: Answers) -> None:
        """Answer one message; with ``fsync``, answers wait for a sync that is for all of them."""
        answer = self._handler.answer(frames)
        if isinstance(answer, DeferredReply):
            self._enqueue(to, answer)
        elif self._settings.fsync:
            answers.append((to, answer))
        else:
            self._send(to, answer)

    def _send_all(self, answers: Answers) -> None:
        if answers and self._durable is not None:
            self._durable.sync()
            for to, answer in answers:
                self._send(to, answer)

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

    def _send(self, to: To, frames: list[Frame]) -> None:
        if isinstance(to, ShmTrainer):
            if to.send(frames):
                reach(FaultPoint.SENT)
                return
            to = self._zmq_route(to)
        try:
            self._socket.send_multipart([to, *frames], zmq.NOBLOCK, copy=False)
            reach(FaultPoint.SENT)
        except zmq.ZMQError:  # it does not read, or is gone
            self._handler.dropped += 1

    def _zmq_route(self, trainer: ShmTrainer) -> bytes:
        """Where a reply goes that is too large for shared memory: the trainer is told to look.

        If not even that can be said, it has not read for long: it loses its memory, notices, and
        asks again.
        """
        peer = self._routes.get(trainer.client)
        if peer is not None and trainer.mark():
            return peer
        if self._listener is not None:
            self._listener.dismiss(trainer)
        return b""

    def _until_timer_ms(self) -> int | None:
        if (
            self._listener is not None
            and self._native is None
            and not self._listener.prepare_sleep()
        ):
            return 0
        again_ms = AGAIN_MS if self._server_socket.is_shut else None
        if not self._settings.snapshot_every_s or self._durable is None:
            return again_ms
        left_ms = max(0, int(1000 * (self._next_snapshot_s - time.monotonic())) + 1)
        return left_ms if again_ms is None else min(left_ms, again_ms)

    def _start_snapshot(self) -> None:
        if self._durable is None or not self._settings.snapshot_every_s:
            return
        if time.monotonic() < self._next_snapshot_s:
            return
        self._next_snapshot_s = time.monotonic() + self._settings.snapshot_every_s
        if self._durable.has_changed and not self._jobs.is_busy:
            try:
                self._jobs.add(self._durable.begin_snapshot(), self._end_snapshot, is_urgent=True)
            except OSError as error:
                log.warning("a snapshot could not begin, journals are kept: %s", error)

    def _end_snapshot(self, job: ForkedJob) -> None:
        assert self._durable is not None
        try:
            job.finish()
        except OSError as error:
            log.warning("a snapshot failed, journals are kept: %s", error)
            return
        self._durable.end_snapshot()

    def _enqueue(self, to: To, deferred: DeferredReply) -> None:
        if not self._jobs.add(deferred.work, self._answer_later(to, deferred)):
            busy = Refusal(deferred.code, "too many saves and loads are waiting already")
            self._send(to, self._handler.refuse(deferred.head, busy))

    def _answer_later(self, to: To, deferred: DeferredReply) -> Callable[[ForkedJob], None]:
        def end(job: ForkedJob) -> None:
            try:
                answer = deferred.done(job.finish())
            except OSError as error:
                answer = self._handler.refuse(deferred.head, Refusal(deferred.code, str(error)))
            except Refusal as refusal:
                answer = self._handler.refuse(deferred.head, refusal)
            self._send(to, answer)

        return end


def _open_listener(
    settings: ServerSettings, incarnation: str, descriptors: DescriptorLimit
) -> ShmListener | None:
    """Where trainers of this host get shared memory; without it, everything goes over ZeroMQ."""
    path = shm_listener_path(settings.address)
    # A message in shared memory has at most half of a ring: where less is allowed, there is none.
    if path is None or not is_possible() or settings.max_message_bytes < CAPACITY // 2:
        return None
    try:
        return ShmListener(path, incarnation, descriptors)
    except OSError as error:
        log.warning("no shared memory for trainers of this host: %s: %s", path, error)
        return None
