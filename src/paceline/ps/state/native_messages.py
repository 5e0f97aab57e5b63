"""Native messages in C: a LOOKUP or PUSH that the native core answers from its frames to its reply.

Called by ``ps/state/store.py`` for messages over ZeroMQ and in replay, and by
``ps/server/native_loop.py`` for those in shared memory; both end in ``native/ps/answer.c``. Takes
what is native and without a fault (``native/ps/check.c`` says what that is) and leaves all others
to Python, which comes to the same result (``tests/ps/state/test_native_messages.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from paceline.ps.protocol.wire import Frame
from paceline.ps.state.meter import Meter
from paceline.ps.state.table import Table

TALLY = struct.Struct("<IIQII")
"""Table, ids, end_ns, took_ns, is_push; ``pl_tally`` in ``native/ps/answer.h``."""
_MOST_UNCOUNTED = 64

Append = Callable[[Sequence[Frame]], None]
"""Journals a message before it is applied."""


class NativeMessages:
    """What the native core answers for the tables of one server.

    Args:
        native: The native core.
        max_reply_bytes: Of one FOUND.
    """

    def __init__(self, native: Any, max_reply_bytes: int) -> None:
        self._tables: list[Table] = []
        self._entries: list[bytearray] = []
        self._responder = native.Responder(self._entries, max_reply_bytes)
        self._uncounted = 0

    def add(self, table: Table) -> None:
        """Take the next table."""
        self._tables.append(table)
        self._entries.append(table.entry.raw)

    def answer(
        self, frames: Sequence[Frame], account: bytearray | None, append: Append | None
    ) -> list[Frame] | None:
        """Answer a message; None: it is for Python, and nothing was done.

        Args:
            frames: Three.
            account: Of the client that may have sent a PUSH.
            append: Called before a PUSH is applied; its exceptions are raised.
        """
        found: list[Frame] | None = self._responder.answer(*frames, account, append)
        self._uncounted += 1
        if self._uncounted >= _MOST_UNCOUNTED:
            self.update_meters()
        return found

    def run(self, *arguments: Any) -> None:
        """Answer what is in shared memory; see ``native/ps/loop.c``."""
        try:
            self._responder.run(*arguments)
        finally:
            self.update_meters()

    def update_meters(self) -> None:
        """Bring the tables' meters up to date. Many messages at once, which is cheaper."""
        self._uncounted = 0
        for number, ids, end_ns, took_ns, is_push in TALLY.iter_unpack(self._responder.tallies()):
            table = self._tables[number]
            meter: Meter = table.pushes if is_push else table.lookups
            meter.add(ids, end_ns - took_ns, end_ns)
