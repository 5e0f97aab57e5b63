"""A launcher's connections with its ranks, and with ``paceline scale``.

Used by :mod:`paceline.elastic.hosts.agent`, in the launcher's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.elastic.hosts.mailbox import Mailbox
from paceline.elastic.keyed_listener import KeyedListener, listen_at
from paceline.elastic.protocol import receive, send, socket_path
from paceline.errors import MembershipError

Hear = Callable[[int, dict[str, Any]], None]


class RankPipes:
    """Listens in a private directory.

    Args:
        directory: Where the socket is put.
        key: Of the job.
        is_member: Whether a number is that of a member of this host.
        hear: Gets a member and what it said.
        scale: Gets the number of a question, and how many ranks somebody asks for.
        complain: Gets a member and what makes no sense of what it said.
    """

    def __init__(
        self,
        directory: Path,
        key: bytes,
        mailbox: Mailbox,
        selector: selectors.BaseSelector,
        *,
        is_member: Callable[[int], bool],
        hear: Hear,
        scale: Callable[[int, int], None],
        complain: Callable[[int, str], None],
    ) -> None:
        self._is_member, self._hear, self._scale = is_member, hear, scale
        self._complain = complain
        self._selector = selector
        self._pipes: dict[int, Connection] = {}
        self._asked: dict[int, Connection] = {}
        self._pinged_s: dict[int, float] = {}  # who has not answered, since when
        self._questions = itertools.count()
        self._is_closed = False
        listener = listen_at(socket_path(directory))
        self._listener = KeyedListener(
            listener, key, lambda *who: mailbox.post(partial(self._admit, *who))
        )

    def _admit(self, hello: dict[str, Any], pipe: Connection) -> None:
        if self._is_closed:
            pipe.close()
            return
        try:
            if hello["kind"] == "scale":
                number = next(self._questions)
                self._asked[number] = pipe
                self._scale(number, int(hello["ranks"]))
                return
            if hello["kind"] != "hello":
                raise MembershipError(f"unknown message {hello['kind']!r}")
            member = int(hello["member"])
        except (MembershipError, KeyError, ValueError, TypeError) as error:
            _answer(pipe, str(error))
            return
        if not self._is_member(member) or member in self._pipes:
            pipe.close()
            return
        self._pipes[member] = pipe
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._listen_to, member))

    def _listen_to(self, member: int) -> None:
        try:
            message = receive(self._pipes[member])
            if message["kind"] == "pong":
                self._pinged_s.pop(member, None)
            else:
                self._hear(member, message)
        except (EOFError, OSError):
            self.drop(member)  # its exit is told by whoever watches processes
        except (MembershipError, KeyError, ValueError, TypeError) as error:
            self.drop(member)
            self._complain(member, f"it said something that makes no sense: {error}")

    def answer(self, question: int, error: str) -> None:
        """Answer who has asked for another number of ranks."""
        pipe = self._asked.pop(question, None)
        if pipe is not None:
            _answer(pipe, error)

    def say(self, member: int, message: dict[str, Any]) -> None:
        """Say something to a rank of this host, if it is there."""
        pipe = self._pipes.get(member)
        if pipe is not None:
            with contextlib.suppress(OSError):  # dead: its exit is on its way
                send(pipe, **message)

    def say_to_all(self, kind: str, **facts: str) -> None:
        """Say something to all ranks of this host."""
        for member in self._there():
            self.say(member, {"kind": kind, **facts})

    def are_there(self) -> bool:
        """Whether ranks are connected."""
        return bool(self._pipes)

    def ping(self) -> None:
        """Ask all whether their interpreters run."""
        for member in self._there():
            if member not in self._pinged_s:
                self._pinged_s[member] = time.monotonic()
                self.say(member, {"kind": "ping"})

    def silent_s(self, member: int) -> float:
        """For how long a member has not answered."""
        asked_s = self._pinged_s.get(member)
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    def _there(self) -> Iterable[int]:
        return list(self._pipes)

    def drop(self, member: int) -> None:
        """Hang up."""
        pipe = self._pipes.pop(member, None)
        self._pinged_s.pop(member, None)
        if pipe is not None:
            self._selector.unregister(pipe)
            pipe.close()

    def close(self) -> None:
        """Take no more members, and hang up. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._listener.close()
        for member in self._there():
            self.drop(member)
        for question in list(self._asked):
            self.answer(question, "the job is over")


def _answer(pipe: Connection, error: str) -> None:
    with pipe, contextlib.suppress(OSError):
        send(pipe, "answer", error=error)
