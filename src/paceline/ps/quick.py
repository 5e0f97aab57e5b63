"""The quick way of small messages: the native core reads and copies, torch does the arithmetic.

Called by ``ps/store.py``, live and in replay, before anything else looks at a message. It takes a
LOOKUP or PUSH that is plain and perfect (``native/rows.c`` says what that is) and leaves all others
to Python, which comes to the same result (``tests/ps/test_quick.py``): what a message costs depends
on the way, what it does never. Large messages are left to Python too: there, a call of numpy costs
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.ps.optim import Adam
from paceline.ps.scratch import Scratch
from paceline.ps.table import Table
from paceline.ps.update import update
from paceline.ps.wire import ALIGNMENT, Frame, Head, Kind, aligned

MOST_BYTES = 1 << 19
"""Of all rows of a message. Gradient, rows and state of a push stay in the cache."""

Section = tuple[int, int, float]
"""Table, how many ids, learning rate."""


class QuickPush:
    """A PUSH that the native core has checked; nothing is changed yet.

    Args:
        quick: Who applies it.
        sections: Of the message.
        plan: The native core's: sections and slots. No address.
        values: The last frame.
        head: Of the message.
    """

    __slots__ = ("_plan", "_quick", "_sections", "_values", "head")

    def __init__(
        self, quick: Quick, sections: Sequence[Section], plan: bytes, values: Frame, head: Head
    ) -> None:
        self._quick = quick
        self._sections = sections
        self._plan = plan
        self._values = values
        self.head = head

    def apply(self) -> dict[str, Any]:
        """Do it; returns the control part of the answer."""
        self._quick.push(self._sections, self._plan, self._values)
        return {}


class Quick:
    """The quick way to the tables of one server.

    Args:
        native: The native core.
        max_reply_bytes: Of one FOUND.
    """

    def __init__(self, native: Any, max_reply_bytes: int) -> None:
        self._native = native
        self._scratch = Scratch(MOST_BYTES)
        self._most_reply_bytes = min(MOST_BYTES, max_reply_bytes)
        self._entries: list[bytearray] = []
        self._tables: list[Table] = []
        self._families: list[int] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def add(self, table: Table) -> None:
        """Take the next table; tables of one family can be updated together."""
        spec = table.spec
        family = (spec.optimizer, spec.dim, spec.dtype)
        self._families.append(self._numbers.setdefault(family, len(self._numbers)))
        self._entries.append(table.entry)
        self._tables.append(table)

    def read(self, frames: Sequence[Frame]) -> list[Frame] | QuickPush | None:
        """Answer a LOOKUP, check a PUSH; None: it is for Python, and nothing was done."""
        if len(frames) != 3:
            return None
        start_ns = time.perf_counter_ns()
        found = self._native.rows_read(self._entries, self._most_reply_bytes, *frames)
        if found is None:
            return None
        if len(found) == 2:
            sections, answer = found
            self._count_lookup(sections, start_ns)
            return answer  # type: ignore[no-any-return]
        sections, plan, request, client, sequence = found
        head = Head(Kind.PUSH, request, client, sequence)
        return QuickPush(self, sections, plan, frames[2], head)

    def push(self, sections: Sequence[Section], plan: bytes, values: Frame) -> None:
        """Apply a checked PUSH."""
        start_ns = time.perf_counter_ns()
        for group in self._groups(sections):
            self._push_alike(sections, plan, values, group)
        end_ns = time.perf_counter_ns()
        since_ns = end_ns - (end_ns - start_ns) // max(1, len(sections))
        for number, ids, _ in sections:
            self._tables[number].pushes.add(ids, since_ns, end_ns)

    def _push_alike(
        self,
        sections: Sequence[Section],
        plan: bytes,
        values: Frame,
        group: tuple[int, int, int, int],
    ) -> None:
        """Gather, update, scatter, as ``ps/together.py`` does."""
        start, stop, count, offset = group
        tables = self._tables
        for number, _, _ in sections[start:stop]:
            tables[number].step += 1
        if not count:
            return
        number, _, lr = sections[start]
        table = tables[number]
        lines = self._scratch.lines(self._families[number], table, count)
        move = (self._entries, plan, start, stop, *lines.addresses)
        self._native.rows_gather(values, offset, lines.grad_address, *move)
        update(table.spec.optimizer, lines.rows, lines.state, lines.grad, lr, table.step)
        self._native.rows_scatter(*move)

    def _groups(self, sections: Sequence[Section]) -> Iterator[tuple[int, int, int, int]]:
        """Sections that are updated together: from, to, their lines, where their values begin.

        Their gradients follow each other without a gap.
        """
        start = begin = end = lines = 0
        last: tuple[int, float, int] | None = None
        for at, (number, ids, lr) in enumerate(sections):
            spec = self._tables[number].spec
            step = self._tables[number].step if type(spec.optimizer) is Adam else 0
            alike = (self._families[number], lr, step)
            if alike != last or end % ALIGNMENT:
                if at:
                    yield start, at, lines, begin
                start, lines, begin, last = at, 0, aligned(end), alike
                end = begin
            lines += ids
            end += ids * spec.dim * spec.dtype.itemsize
        if sections:
            yield start, len(sections), lines, begin

    def _count_lookup(self, sections: Sequence[Section], start_ns: int) -> None:
        end_ns = time.perf_counter_ns()
        since_ns = end_ns - (end_ns - start_ns) // max(1, len(sections))
        for number, ids, _ in sections:
            self._tables[number].lookups.add(ids, since_ns, end_ns)
