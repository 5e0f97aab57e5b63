"""Pushes that a server refused: nobody waits for their replies, and yet nobody must miss one.

``ps/client/ledger.py`` notes them when the reply comes, or when a WELCOME tells of it; the next
call of the trainer raises (``check_refused``). What was refused is reported once, with table, rows
and reason.

[Note: no refusal is missed]
A push is answered by DONE or ERROR. If the ERROR is lost with its connection, the WELCOME that ends
the doubt has it: the server's last few refusals of this client by number, and how many there were
in all. What is struck off as applied is looked up among the former; if the trainer has heard of
fewer than the latter, others were refused whose number the server has forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import PushRefusedError
from paceline.ps.protocol.wire import RECORD, Frame

if TYPE_CHECKING:
    from paceline.ps.client.channel import Channel
    from paceline.ps.client.ledger import OpenRequest

_IDS = 3  # so many are named


@dataclass(slots=True)
class Refused:
    """Pushes to one server that nobody has been told of.

    Args:
        pushes: How many.
        rows: In all of them, as far as they are known.
        tables: Their numbers on the server.
        ids: The first ones of the first push.
        reason: What the server said of the first one.
    """

    pushes: int = 0
    rows: int = 0
    tables: set[int] = field(default_factory=set)
    ids: list[int] = field(default_factory=list)
    reason: Mapping[str, Any] = field(default_factory=dict)

    def add(self, pending: OpenRequest, reason: Mapping[str, Any]) -> None:
        """Note a push, before its arrays are let go."""
        if not self.pushes:
            self.reason = reason
            self.ids = _first_ids(pending.arrays)
        self.pushes += 1
        if pending.sections:
            records = np.frombuffer(pending.tail, RECORD, pending.sections)
            self.rows += int(records["ids"].sum())
            self.tables.update(records["table"].tolist())

    def add_unknown(self, count: int) -> None:
        """Note pushes whose numbers the server has forgotten."""
        self.reason = self.reason or {"text": "the server's log has the reasons"}
        self.pushes += count


def check_refused(channels: Iterable[Channel], what: str) -> None:
    """Raise if a server has refused a push and the program has not been told yet.

    Raises:
        PushRefusedError: For all servers together.
    """
    found = [(channel, refused) for channel in channels if (refused := channel.take_refused())]
    if not found:
        return
    channel, first = found[0]
    tables = named(channel, first)
    raise channel.server.error(
        PushRefusedError,
        what,
        f"before this {what}, "
        + "; ".join(describe(*each) for each in found)
        + ". These gradients are not in the tables; all other pushes are",
        pushes=sum(refused.pushes for _, refused in found),
        rows=sum(refused.rows for _, refused in found),
        code=str(first.reason.get("code", "")),
        id=first.reason.get("id"),
        table=first.reason.get("table") or (tables[0] if tables else None),
    )


def describe(channel: Channel, refused: Refused) -> str:
    """What happened, for people."""
    tables = ", ".join(map(repr, named(channel, refused)[:_IDS]))
    ids = ", ".join(map(str, refused.ids))
    rows = f" ({refused.rows} rows of {tables}; ids {ids}, ...)" if refused.rows else ""
    return (
        f"{channel.server} refused {refused.pushes} of this trainer's pushes{rows}: "
        f"{refused.reason.get('text')}"
    )


def named(channel: Channel, refused: Refused) -> list[str]:
    """The tables' names."""
    numbers = sorted(refused.tables)
    return [channel.names.get(number, f"table {number}") for number in numbers]


def _first_ids(arrays: tuple[Frame, ...]) -> list[int]:
    if not arrays:
        return []
    count = min(_IDS, len(arrays[0]) // 8)
    return [int(each) for each in np.frombuffer(arrays[0], np.int64, count)]
