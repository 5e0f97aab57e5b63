"""The quick way of small messages: the native core reads and copies, torch does the arithmetic.

Called by ``ps/state/store.py``, live and in replay, before anything else looks at a message. It
takes a LOOKUP or PUSH that is plain and perfect (``native/ps/check.c`` says what that is) and
leaves all others to Python, which comes to the same result
(``tests/ps/state/test_plain_messages.py``): what a message costs depends on the way, what it does
never. Large messages are left to Python too, where a call of numpy is cheap beside its work.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

from paceline.ps.protocol.wire import Frame, Head, Kind
from paceline.ps.state.meter import Meter
from paceline.ps.state.scratch import Scratch
from paceline.ps.state.table import Table
from paceline.ps.state.updates import update

MOST_BYTES = 1 << 19
"""Of all rows of a message. Gradient, rows and state of a push stay in the cache."""
_MOST_UNSETTLED = 64

_SHARE = struct.Struct("<II")  # table, ids
_PUSH = Kind.PUSH


class QuickPush:
    """A PUSH that the native core has checked; nothing is changed yet.

    Args:
        quick: Who applies it.
        found: What the native core says of it: no address.
        values: The last frame.
    """

    __slots__ = ("_groups", "_quick", "_shares", "_slots", "_values", "done", "head")

    def __init__(self, quick: Quick, found: tuple[Any, ...], values: Frame) -> None:
        self._quick = quick
        self._values = values
        self._shares, self._slots, self._groups, request, client, sequence, done = found
        self.head = Head(_PUSH, request, client, sequence)
        self.done: list[Frame] = [done]

    def apply(self) -> dict[str, Any]:
        """Do it; returns the control part of the answer."""
        start_ns = time.perf_counter_ns()
        for start, stop, count, offset, number, lr in self._groups:
            part = (self._shares, self._slots, start, stop)
            self._quick.push_alike(number, count, lr, (self._values, offset), part)
        self._quick.count(self._shares, start_ns, is_push=True)
        return {}


class Quick:
    """The quick way to the tables of one server.

    Args:
        native: The native core.
        max_reply_bytes: Of one FOUND.

    Attributes:
        entries: Of the tables, by number.
        most_bytes: Of all rows of a message.
    """

    def __init__(self, native: Any, max_reply_bytes: int) -> None:
        self._read = native.rows_read
        self._gather = native.rows_gather
        self._scatter = native.rows_scatter
        self._scratch = Scratch(MOST_BYTES)
        self.most_bytes = min(MOST_BYTES, max_reply_bytes)
        self._tables: list[Table] = []
        self.entries: list[bytearray] = []
        self._families: dict[tuple[object, ...], int] = {}
        self._unsettled: list[tuple[bytes, int, int, bool]] = []

    def add(self, table: Table) -> None:
        """Take the next table."""
        spec = table.spec
        alike = (spec.optimizer, spec.dim, spec.dtype)
        table.entry.set_family(self._families.setdefault(alike, len(self._families)))
        self._tables.append(table)
        self.entries.append(table.entry.raw)

    def read(self, frames: Sequence[Frame]) -> list[Frame] | QuickPush | None:
        """Answer a LOOKUP, check a PUSH; None: it is for Python, and nothing was done."""
        if len(frames) != 3:
            return None
        start_ns = time.perf_counter_ns()
        found = self._read(self.entries, self.most_bytes, *frames)
        if found is None:
            return None
        if len(found) > 2:
            return QuickPush(self, found, frames[2])
        shares, answer = found
        self.count(shares, start_ns, is_push=False)
        return answer  # type: ignore[no-any-return]

    def push_alike(
        self,
        number: int,
        count: int,
        lr: float,
        values: tuple[Frame, int],
        part: tuple[bytes, bytes, int, int],
    ) -> None:
        """Gather, update, scatter, as ``ps/state/grouped_updates.py`` does.

        Args:
            number: Of the first table.
            count: Of all rows.
            lr: Of all.
            values: The frame, and where their gradients begin in it.
            part: Shares and slots of the message, and from and to which share.
        """
        table = self._tables[number]
        lines = self._scratch.lines(table, count)
        move = (self.entries, *part, *lines.addresses)
        step = self._gather(*values, lines.grad_address, *move)
        if count:
            update(table.spec.optimizer, lines.rows, lines.state, lines.grad, lr, step)
            self._scatter(*move)

    def count(self, shares: bytes, start_ns: int, is_push: bool) -> None:
        """Remember that these shares of a message are done, for meters."""
        end_ns = time.perf_counter_ns()
        self._unsettled.append((shares, end_ns - start_ns, end_ns, is_push))
        if len(self._unsettled) >= _MOST_UNSETTLED:
            self.settle()

    def settle(self) -> None:
        """Bring the tables' meters up to date. Many messages at once, which is cheaper."""
        for shares, took_ns, end_ns, is_push in self._unsettled:
            since_ns = end_ns - took_ns * _SHARE.size // max(_SHARE.size, len(shares))
            for number, ids in _SHARE.iter_unpack(shares):
                table = self._tables[number]
                meter: Meter = table.pushes if is_push else table.lookups
                meter.add(ids, since_ns, end_ns)
        self._unsettled.clear()
