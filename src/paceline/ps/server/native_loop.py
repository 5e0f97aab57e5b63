"""The part of a server's loop that needs no Python: plain messages, from ring to ring.

Called by ``ps/server/loop.py`` where it would wait. ``native/ps/loop.c`` answers what it can and
returns when there is something for Python; what it cannot answer is still in the ring then.
Journals are Python's: with one, pushes are too.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from paceline.native.extension import native
from paceline.ps.server.shm_listener import Door, Visitor
from paceline.ps.state.plain_messages import Quick
from paceline.ps.state.store import Store

_TALLY = struct.Struct("<IIQII")  # table, ids, end_ns, took_ns, is_push
_WAYS = (1, 2)  # SGD with two roundings, with one
_NO_PUSH = 0


class Attendant:
    """Answers the visitors of one server.

    Args:
        store: Of the server.
        quick: The quick way to its tables.
        may_push: Whether pushes need no journal.
    """

    def __init__(self, store: Store, quick: Quick, *, may_push: bool) -> None:
        self._native: Any = native.Attendant()
        self._store = store
        self._quick = quick
        self._way = sgd_way() if may_push else _NO_PUSH
        self._pairs: list[Any] = []
        self._accounts: list[bytearray] = []
        self._visitors: list[Visitor] = []

    def attend(self, door: Door, fds: list[int], timeout_ms: int) -> None:
        """Answer until Python is needed, one of ``fds`` has something, or the time is over."""
        if self._visitors != list(door.visitors.values()):  # the same client may be another visitor
            self._meet(door)
        quick = self._quick
        self._native.attend(
            *(self._pairs, self._accounts, quick.entries, quick.most_bytes, self._way),
            *(door.event, fds, timeout_ms),
        )
        self._settle(self._native.tallies())

    def _meet(self, door: Door) -> None:
        """Visitors have come or gone."""
        clients = self._store.clients
        for visitor in self._visitors:
            if visitor.client not in door.visitors:
                clients.unpin(visitor.client)
        self._visitors = list(door.visitors.values())
        self._accounts = [clients.pin(visitor.client) for visitor in self._visitors]
        self._pairs = [visitor.pair for visitor in self._visitors]

    def _settle(self, tallies: bytes) -> None:
        for number, ids, end_ns, took_ns, is_push in _TALLY.iter_unpack(tallies):
            table = self._store.tables[number]
            meter = table.pushes if is_push else table.lookups
            meter.add(ids, end_ns - took_ns, end_ns)


def sgd_way() -> int:
    """How the native core has to add to get the bits that torch gets, here; 0 if it cannot.

    Tried out on numbers of all sizes, zeros and numbers that round differently included.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (4, 1021)  # no multiple of any vector's width
    exponents = torch.randint(-30, 30, (2, *shape), generator=generator)
    rows, grad = torch.randn((2, *shape), generator=generator) * 2.0**exponents
    grad[0, ::7] = 0
    alphas = (-0.05, -1.0, -1e-3, -0.1)
    expected = [rows[at].clone().add_(grad[at], alpha=alpha) for at, alpha in enumerate(alphas)]
    for way in _WAYS:
        found = rows.clone()
        addresses = [(found[at].data_ptr(), grad[at].data_ptr()) for at in range(len(alphas))]
        can = [
            native.sgd(*each, shape[1], alpha, way)
            for each, alpha in zip(addresses, alphas, strict=True)
        ]
        if all(can) and torch.equal(
            found.view(torch.int32), torch.stack(expected).view(torch.int32)
        ):
            return way
    return _NO_PUSH
