"""From a message to its answer: what a server does, without its socket.

Called by ``ps/server/loop.py`` for each message, and by tests with anything at all. Journals what
changes the store between check and change. Always answers: what cannot be read or obeyed is an
ERROR, counted and logged a few lines at a time.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ServerStateError
from paceline.ps.protocol.wire import (
    SEQUENCED,
    Frame,
    Head,
    Kind,
    Message,
    WireError,
    pack_control,
    read_head,
    unpack,
)
from paceline.ps.server.loads import Loads
from paceline.ps.server.refusal_log import RefusalLog
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.clients import Admission
from paceline.ps.state.native_messages import Append
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.faults import FaultPoint, reach
from paceline.ps.storage.save import save_id, save_job, tidy_job

log = logging.getLogger("paceline.ps")

_PAGE = 32  # tables in one answer to STATS; more might not fit into a control message
_NOBODY = Head(Kind.ERROR, 0, bytes(16))


@dataclass(frozen=True)
class DeferredReply:
    """An answer that comes when a forked child has done its work."""

    head: Head
    work: Callable[[], dict[str, Any]]
    code: Code = Code.SAVE
    """Of a refusal, if it fails."""

    def done(self, value: dict[str, Any]) -> list[Frame]:
        """The answer.

        Raises:
            Refusal: That is what the child found.
        """
        if "refusal" in value:
            raise Refusal.from_json(value["refusal"])
        return _done(self.head, value)


class Handler:
    """Answers messages for one store.

    Args:
        store: The state.
        durable: Its directory, or None for memory only.
        place: Where clients may save.

    Attributes:
        store: The state.
        append: Journals a message that was checked, before it is applied; None without a directory.
    """

    def __init__(self, store: Store, durable: Durable | None, place: SaveRoot) -> None:
        self.store = store
        self._durable = durable
        self.append: Append | None = None if durable is None else durable.append_checked
        self._place = place
        self._loads = Loads(store, durable, place)
        self._start_s = time.monotonic()
        self.refusals = RefusalLog()
        self.dropped = 0
        self.incarnation = secrets.token_hex(8)

    def answer(self, frames: list[Frame]) -> list[Frame] | DeferredReply:
        """Do what a message says.

        Raises:
            ServerStateError: The journal cannot be written: the server has to end.
        """
        answered = self.store.answer_native(frames, self.append)
        if answered is not None:
            if len(answered) == 1:  # DONE
                reach(FaultPoint.APPLIED)
            return answered
        try:
            message = unpack(frames)
        except WireError as error:
            return self._refuse_unread(frames, error)
        head = message.head
        try:
            if head.kind in SEQUENCED:
                return _done(head, self._change(message, frames))
            return self._look(message)
        except Refusal as refusal:
            return self.refuse(head, refusal)
        except ServerStateError:
            raise
        except Exception as error:
            log.exception("%s failed; this is a fault of the server", head.kind.name)
            text = f"{type(error).__name__} in the server: {error}"
            return self.refuse(head, Refusal(Code.INTERNAL, text))

    def refuse(self, head: Head, refusal: Refusal) -> list[Frame]:
        """Log and answer."""
        what = f"{head.kind.name} {head.sequence} of client {head.client.hex()[:8]}"
        return self._refuse(what, head, refusal)

    def _refuse_unread(self, frames: list[Frame], error: WireError) -> list[Frame]:
        code = Code.VERSION if str(error).startswith("version") else Code.WIRE
        try:
            head, _ = read_head(frames[0])
        except (WireError, IndexError):
            head = _NOBODY
        return self._refuse("a message", head, Refusal(code, str(error)))

    def _refuse(self, what: str, head: Head, refusal: Refusal) -> list[Frame]:
        self.refusals.add(f"refused {what}: [{refusal.code.value}] {refusal.text}")
        return pack_control(_reply(Kind.ERROR, head), refusal.to_json())

    def _look(self, message: Message) -> list[Frame] | DeferredReply:
        head = message.head
        if head.kind is Kind.LOOKUP:
            return self.store.lookup(message)
        if head.kind is Kind.HELLO:
            return pack_control(_reply(Kind.WELCOME, head), self._welcome(head, message.control))
        if head.kind is Kind.STATS:
            return _done(head, self._stats(message.control))
        if head.kind is Kind.SAVE:
            directory = self._place.directory(message.control, Code.SAVE)
            job = tidy_job if message.control.get("tidy") else save_job
            return DeferredReply(head, job(self.store, directory, save_id(message.control)))
        if head.kind is Kind.STAGE:
            work = self._loads.stage(message.control)
            return _done(head, {}) if work is None else DeferredReply(head, work, Code.LOAD)
        raise Refusal(Code.WIRE, f"{head.kind.name} is no request")

    def _change(self, message: Message, frames: list[Frame]) -> dict[str, Any]:
        """Check, journal, do: in this order (decision 0007)."""
        store, head = self.store, message.head
        if store.clients.admit(head) is Admission.AGAIN:
            return store.repeat(message)
        try:
            if head.kind is Kind.LOAD:
                return self._loads.load(message)
            change = store.prepare(message)
        except Refusal as refusal:
            if self._durable is not None:
                self._durable.append_refused(head, refusal)
            store.clients.count(head, refusal)
            raise
        if self.append is not None:
            self.append(frames)
        done = store.commit(head, change)
        reach(FaultPoint.APPLIED)
        return done

    def _welcome(self, head: Head, control: Mapping[str, Any]) -> dict[str, Any]:
        nonce = control.get("nonce")
        if type(nonce) is not int or nonce.bit_length() > 64:
            raise Refusal(Code.WIRE, "HELLO without a nonce of at most 64 bits")
        refused, last = self.store.clients.refusals(head.client)
        return {
            "nonce": nonce,
            "incarnation": self.incarnation,
            "applied": self.store.clients.applied(head.client),
            "refused": refused,
            "refusals": [[number, refusal.to_json()] for number, refusal in last.items()],
            "max_message_bytes": self.store.max_message_bytes,
            "durable": self._durable is not None,
            "server": f"paceline {VERSION_TEXT}",
        }

    def _stats(self, control: Mapping[str, Any]) -> dict[str, Any]:
        first = control.get("first", 0)
        if type(first) is not int or first < 0:
            raise Refusal(Code.WIRE, "STATS begins with a table's number")
        return {
            "version": VERSION_TEXT,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "rss_bytes": _rss_bytes(),
            "incarnation": self.incarnation,
            "durable": self._durable is not None,
            "clients": len(self.store.clients),
            "refused": self.refusals.total,
            "dropped": self.dropped,
            "used_bytes": self.store.budget.used_bytes,
            "max_bytes": self.store.budget.limit_bytes,
            "table_count": len(self.store.tables),
            "tables": self.store.stats(first, first + _PAGE),
        }


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


def _version_text() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        return "unknown"


VERSION_TEXT = _version_text()
