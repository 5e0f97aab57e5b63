"""The server's loop: one thread, one ROUTER socket, one message after the other.

Called by ``ps/process.py``. Takes messages apart, hands them to the store, journals what changes
it, and answers. Whatever arrives, the loop goes on: bytes that are no message, and messages that
cannot be obeyed, are answered with ERROR and logged, a few lines at a time.

[Note: bounded]
A frame has at most ``max_message_bytes``; a message that has more frames than any kind has is
thrown away as it is read; a peer that does not read its replies loses those beyond ``QUEUED``, and
asks again by the protocol. No reply is ever waited for.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import zmq

from paceline.ps.clients import Admission
from paceline.ps.outlet import RefusalLog
from paceline.ps.refusal import Code, Refusal
from paceline.ps.settings import ServerSettings
from paceline.ps.store import Store
from paceline.ps.wire import SEQUENCED, Frame, Head, Kind, Message, WireError, pack_control, unpack

log = logging.getLogger("paceline.ps")

QUEUED = 256
"""So many messages wait for one peer, in each direction."""
AT_ONCE = 64
"""So many are handled before timers and signals are looked at."""
_FRAMES = 3
_SMALL = 8192  # ZeroMQ packs smaller frames anywhere into a buffer, so they are not aligned
_PAGE = 32  # tables in one answer to STATS; more might not fit into a control message
_NOBODY = Head(Kind.ERROR, 0, bytes(16))


class Server:
    """Serves one store at one address.

    Args:
        settings: Where and how.
        store: What.
    """

    def __init__(self, settings: ServerSettings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._refusals = RefusalLog()
        self._dropped = 0
        self._start_s = time.monotonic()
        self.incarnation = secrets.token_hex(8)
        self._context = zmq.Context()
        self._socket = _router(self._context, settings)
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def run(self, stop_fds: list[int]) -> None:
        """Serve until one of the descriptors has something to read, or its other end is closed."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in stop_fds:
            poller.register(descriptor, zmq.POLLIN | zmq.POLLERR)
        while True:
            ready = dict(poller.poll())
            if any(descriptor in ready for descriptor in stop_fds):
                return
            self._serve_some()

    def close(self) -> None:
        """Let go of socket and address. Replies that are on their way get a moment."""
        self._refusals.flush()
        self._socket.close(linger=200)
        self._context.term()
        path = self._settings.socket_path
        if path is not None:
            path.unlink(missing_ok=True)

    def _serve_some(self) -> None:
        for _ in range(AT_ONCE):
            try:
                peer, frames = self._receive()
            except zmq.Again:
                return
            self._send(peer, self._answer(frames))

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
        except (zmq.Again, zmq.ZMQError):  # it does not read, or is gone
            self._dropped += 1

    def _answer(self, frames: list[Frame]) -> list[Frame]:
        try:
            message = unpack(frames)
        except WireError as error:
            return self._refuse(_NOBODY, "a message", Refusal(Code.WIRE, str(error)))
        head = message.head
        try:
            if head.kind in SEQUENCED:
                return _done(head, self._change(message))
            return self._look(message)
        except Refusal as refusal:
            what = f"{head.kind.name} {head.sequence} of client {head.client.hex()[:8]}"
            return self._refuse(head, what, refusal)
        except Exception as error:
            log.exception("%s failed; this is a fault of the server", head.kind.name)
            text = f"{type(error).__name__} in the server: {error}"
            return self._refuse(head, head.kind.name, Refusal(Code.INTERNAL, text))

    def _look(self, message: Message) -> list[Frame]:
        head = message.head
        if head.kind is Kind.LOOKUP:
            return self._store.lookup(message)
        if head.kind is Kind.HELLO:
            return pack_control(_reply(Kind.WELCOME, head), self._welcome(head, message.control))
        if head.kind is Kind.STATS:
            return _done(head, self._stats(message.control))
        raise Refusal(Code.WIRE, f"{head.kind.name} is no request")

    def _change(self, message: Message) -> dict[str, Any]:
        if self._store.admit(message.head) is Admission.AGAIN:
            return self._store.repeat(message)
        try:
            change = self._store.prepare(message)
        except Refusal as refusal:
            self._store.clients.count(message.head, refusal)
            raise
        return self._store.commit(message.head, change)

    def _welcome(self, head: Head, control: Mapping[str, Any]) -> dict[str, Any]:
        nonce = control.get("nonce")
        if type(nonce) is not int or nonce.bit_length() > 64:
            raise Refusal(Code.WIRE, "HELLO without a nonce of at most 64 bits")
        return {
            "nonce": nonce,
            "incarnation": self.incarnation,
            "applied": self._store.clients.applied(head.client),
            "durable": self._settings.directory is not None,
            "server": f"paceline {VERSION_TEXT}",
        }

    def _stats(self, control: Mapping[str, Any]) -> dict[str, Any]:
        first = control.get("first", 0)
        if type(first) is not int or first < 0:
            raise Refusal(Code.WIRE, "STATS begins with a table's number")
        return {
            "version": VERSION_TEXT,
            "pid": os.getpid(),
            "address": self.address,
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "rss_bytes": _rss_bytes(),
            "incarnation": self.incarnation,
            "durable": self._settings.directory is not None,
            "clients": len(self._store.clients),
            "refused": self._refusals.total,
            "dropped": self._dropped,
            "used_bytes": self._store.budget.used_bytes,
            "max_bytes": self._store.budget.limit_bytes,
            "table_count": len(self._store.tables),
            "tables": self._store.stats(first, first + _PAGE),
        }

    def _refuse(self, head: Head, what: str, refusal: Refusal) -> list[Frame]:
        self._refusals.add(f"refused {what}: [{refusal.code.value}] {refusal.text}")
        return pack_control(_reply(Kind.ERROR, head), refusal.to_json())


def _version_text() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        return "unknown"


VERSION_TEXT = _version_text()


def _router(context: zmq.Context[zmq.Socket[bytes]], settings: ServerSettings) -> Any:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    # A reply that cannot go out is counted instead of vanishing.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(settings.address)
    return socket


def _reply(kind: Kind, head: Head) -> Head:
    return Head(kind, head.request, head.client)


def _done(head: Head, control: dict[str, Any]) -> list[Frame]:
    return pack_control(_reply(Kind.DONE, head), control)


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0
