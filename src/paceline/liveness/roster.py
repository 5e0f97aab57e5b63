"""The ranks of one group: who they are, and which of them has died first.

Filled by :meth:`Roster.meet`, which is a collective. What a rank writes into the group's store
before that is for those who lose a peer in the middle of it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.forks import tell_children
from paceline.liveness.deaths import Deaths
from paceline.liveness.identity import Identity, describe_process
from paceline.liveness.links import LinkAddress, LinkListener, is_unreachable, make_links
from paceline.processes import open_pidfd

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""Gives every rank what each rank says (JSON), in rank order."""

STORE_WAIT_S = 1.0
_KEY = "paceline/process/{}"
_LOST = "paceline/lost"
_FAILED = "paceline/failed/{}"


class PeerRoster:
    """What this rank knows of the others. Keys of ``deaths`` are ranks.

    Attributes:
        is_complete: All ranks have met.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank, self._world = rank, world
        self._known: dict[int, Identity] = {}
        self._links: dict[int, socket.socket] = {}
        self._unreachable: dict[int, bool] = {}
        self._lock = threading.Lock()
        self.deaths = Deaths()
        self.is_complete = world == 1
        self._me = describe_process(rank)
        self._ask_store(lambda: store.set(_KEY.format(rank), json.dumps(self._me.to_json())))

    def meet(self, gather: Gather) -> None:
        """Learn who all ranks are. Collective over the group."""
        answers = gather(self._me.to_json())
        for rank, answer in enumerate(answers):
            self._note(Identity.from_json(answer, rank))
        remote = [rank for rank, peer in self._known.items() if peer.host != self._me.host]
        # Every rank knows the hosts, so all gather once more, or none does.
        if len({peer.host for peer in self._known.values()}) > 1:
            self._link(gather, sorted(remote))
        self.is_complete = True

    def _link(self, gather: Gather, remote: list[int]) -> None:
        listener = LinkListener()
        try:
            addresses = [LinkAddress.from_json(each) for each in gather(listener.where.to_json())]
            self._links = make_links(self._rank, addresses, remote, listener)
            tell_children(self)
        finally:
            listener.close()
        for rank, link in self._links.items():
            self.deaths.watch(rank, link.fileno())

    def _note(self, peer: Identity) -> None:
        """Remember a rank; watch it, if this host can see its process."""
        with self._lock:
            is_new = self._known.get(peer.rank) != peer
            self._known[peer.rank] = peer
            if is_new and peer.rank != self._rank and peer.host == self._me.host:
                pidfd = open_pidfd(peer.pid, peer.started)
                self.deaths.watch(peer.rank, pidfd, owned=True)

    def first_lost(self, timeout_s: float = 0.0) -> Identity | None:
        """Return the rank that died first, if one has; otherwise wait for one to die."""
        dead = self.deaths.look(timeout_s)
        return self._known.get(dead[0]) if dead else None

    def is_unreachable(self, peer: Identity) -> bool:
        """Whether its host does not answer any more, rather than that the process has ended."""
        with self._lock:
            link = self._links.get(peer.rank)
            if link is not None and peer.rank not in self._unreachable:
                self._unreachable[peer.rank] = is_unreachable(link)
            return self._unreachable.get(peer.rank, False)

    def learn_from_store(self) -> list[int] | None:
        """Before all have met: note those who have said who they are; return the ranks missing.

        None if the store does not answer.
        """
        unknown = [r for r in range(self._world) if r != self._rank and r not in self._known]
        words = self._ask_store(lambda: [self._read(rank) for rank in unknown])
        if words is None:
            return None
        for rank, word in zip(unknown, words, strict=True):
            if word:
                self._note(Identity.from_json(json.loads(word), rank))
        return [rank for rank in unknown if rank not in self._known]

    def agree_on_first(self, rank: int) -> int:
        """Before all have met: agree on which rank was lost first, and return it.

        A rank says so before it raises, and ends: whoever sees that one gone finds the word.
        """
        if self.is_complete:
            return rank
        word = self._ask_store(lambda: self._store.compare_set(_LOST, "", str(rank)))
        return int(word) if word else rank

    def tell_failure(self, attempt: int, text: str) -> None:
        """Say that something that all ranks attempt together has failed here; the first counts."""
        word = json.dumps([self._rank, text])
        self._ask_store(lambda: self._store.compare_set(_FAILED.format(attempt), "", word))

    def failure(self, attempt: int) -> tuple[int, str] | None:
        """Which rank has failed in an attempt, and why."""
        key = _FAILED.format(attempt)
        word = self._ask_store(lambda: self._store.get(key) if self._store.check([key]) else b"")
        if not word:
            return None
        rank, text = json.loads(word)
        return int(rank), str(text)

    def identity(self, rank: int) -> Identity | None:
        """Who a rank is, if it has said so."""
        return self._known.get(rank)

    def others(self) -> list[Identity]:
        """All other ranks that have said who they are."""
        known = sorted(self._known.items())
        return [peer for rank, peer in known if rank != self._rank]

    def _read(self, rank: int) -> bytes:
        key = _KEY.format(rank)
        word: bytes = self._store.get(key) if self._store.check([key]) else b""
        return word

    def _ask_store(self, ask: Callable[[], T]) -> T | None:
        """Ask on a thread: a store whose host is gone may not answer for minutes."""
        found: list[T] = []

        def run() -> None:
            try:
                found.append(ask())
            except RuntimeError:  # the store is gone; nobody could be told
                return

        thread = threading.Thread(target=run, name="paceline-store", daemon=True)
        thread.start()
        thread.join(STORE_WAIT_S)
        return found[0] if found else None

    def close(self) -> None:
        """Close every descriptor."""
        self.deaths.close()
        self.let_go()

    def let_go(self) -> None:
        """In a forked child too: it would hold the links open after its parent's death."""
        for link in self._links.values():
            link.close()
