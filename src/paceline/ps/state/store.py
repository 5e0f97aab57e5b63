"""The state of a server, and what each message does to it; live and in replay the same code.

``ps/server/dispatch.py`` calls ``answer_native`` for all messages. For what it leaves to Python
it calls ``lookup``, or, for what changes, ``admit``, ``prepare`` and ``commit``, with the journal
between the last two; ``ps/storage/durable.py`` calls the same for each record of a journal. So a
replayed server cannot differ from the one that died. Must not know sockets or files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline.native import extension
from paceline.ps.protocol.table_spec import Shard, TableSpec
from paceline.ps.protocol.wire import (
    ALIGNMENT,
    HEAD,
    Frame,
    Head,
    Kind,
    Message,
    client_of,
    pack_head,
)
from paceline.ps.state.clients import Clients
from paceline.ps.state.meter import Meter
from paceline.ps.state.native_messages import Append, NativeMessages
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.table import MemoryBudget, Table
from paceline.ps.state.validate import CheckedSection, checked, reply_bytes

log = logging.getLogger(__name__)

MOST_TABLES = 4096

Change = Callable[[], dict[str, Any]]
"""Does what was checked, and returns the control part of the answer."""


class Store:
    """Tables and clients of one server.

    Args:
        max_bytes: Of rows and their state, for all tables together.
        max_reply_bytes: Of one FOUND.

    Attributes:
        max_message_bytes: Of one frame, in either direction.
        native_messages: What the native core answers, if there is one.
    """

    def __init__(self, max_bytes: int, max_reply_bytes: int) -> None:
        self.budget = MemoryBudget(max_bytes)
        self.clients = Clients()
        self.tables: list[Table] = []
        self._by_name: dict[str, Table] = {}
        self.max_message_bytes = max_reply_bytes
        native = extension.native
        self.native_messages = None if native is None else NativeMessages(native, max_reply_bytes)

    def answer_native(self, frames: Sequence[Frame], append: Append | None) -> list[Frame] | None:
        """Let the native core answer a message, as far as it can.

        Args:
            frames: Any.
            append: Journals a push before it is applied; what it raises is raised.

        Returns:
            The reply; None if the message is Python's, and then nothing was done.
        """
        if self.native_messages is None or len(frames) != 3 or len(frames[0]) < HEAD.size:
            return None
        client = client_of(frames[0])
        found = self.native_messages.answer(frames, self.clients.account(client), append)
        if found is None:
            self.native_messages.update_meters()  # meters get calls in their order
        elif len(found) == 1:  # DONE
            self.clients.refresh(client)
        return found

    def lookup(self, message: Message) -> list[Frame]:
        """Answer a LOOKUP. Changes nothing but meters.

        Raises:
            Refusal: It does not fit.
        """
        start_ns = time.perf_counter_ns()
        shares = checked(self.tables, message)
        sizes = list(reply_bytes(shares))
        total = sum(sizes)
        if total > self.max_message_bytes:
            raise Refusal(
                Code.SIZE,
                f"the reply would have {total} bytes, and {self.max_message_bytes} are allowed "
                "(--max-message-bytes): ask for fewer rows at a time",
            )
        values = np.empty(total, np.uint8)
        at = 0
        for share, size in zip(shares, sizes, strict=True):
            at += size
            if size and share.table.raw_dtype.itemsize % ALIGNMENT:
                values[at - ALIGNMENT : at] = 0  # what pads it is nobody's old memory
            _found(share, values, at - size)
            end_ns = time.perf_counter_ns()
            share.table.lookups.add(share.section.ids, start_ns, end_ns)
            start_ns = end_ns
        head = message.head
        reply = pack_head(Head(Kind.FOUND, head.request, head.client), len(shares))
        return [reply + message.records, b"", values.data]

    def prepare(self, message: Message) -> Change:
        """Check a sequenced message completely. Changes nothing.

        Raises:
            Refusal: It does not fit.
        """
        if message.head.kind is Kind.ATTACH:
            return self._prepare_attach(message)
        shares = self._checked_with_memory(message)
        is_push = message.head.kind is Kind.PUSH

        def change() -> dict[str, Any]:
            for share in shares:
                share.push() if is_push else share.write()
            return {}

        return change

    def commit(self, head: Head, change: Change) -> dict[str, Any]:
        """Do what was prepared, and count it.

        Raises:
            Refusal: Something failed that no check foresaw. Half of a push may be applied; a replay
                fails at the same place, and the server goes on.
        """
        try:
            done = change()
        except Exception as error:
            log.exception("%s failed; this is a fault of the server", head.kind.name)
            refusal = Refusal(Code.INTERNAL, f"{type(error).__name__} in the server: {error}")
            self.clients.count(head, refusal)
            raise refusal from error
        self.clients.count(head, None)
        return done

    def repeat(self, message: Message) -> dict[str, Any]:
        """The control part of the answer to a message that was applied before."""
        if message.head.kind is not Kind.ATTACH:
            return {}
        spec, shard = _described(message.control)
        known = self._by_name.get(spec.name)
        if known is None:
            text = f"number {message.head.sequence} of this client was something else"
            raise Refusal(Code.TABLE, text, table=spec.name)
        return {"table": self._same(known, spec, shard).number}

    def create(self, spec: TableSpec, shard: Shard) -> Table:
        """Make a table. Its memory comes with its rows."""
        table = Table(len(self.tables), spec, shard, self.budget)
        self.tables.append(table)
        self._by_name[spec.name] = table
        if self.native_messages is not None:
            self.native_messages.add(table)
        return table

    def forget_traffic(self) -> None:
        """Let all meters begin anew."""
        if self.native_messages is not None:
            self.native_messages.update_meters()
        for table in self.tables:
            table.lookups, table.pushes = Meter(), Meter()

    def stats(self, first: int, last: int) -> list[dict[str, Any]]:
        """For each of these tables: what it is, how full, how busy."""
        if self.native_messages is not None:
            self.native_messages.update_meters()
        return [
            {
                "name": table.spec.name,
                "shard": f"{table.shard.sharding.value} {table.shard.index}/{table.shard.count}",
                "table_rows": table.spec.rows,
                "dim": table.spec.dim,
                "optimizer": type(table.spec.optimizer).__name__,
                "rows": table.count,
                "bytes": table.count * table.row_bytes,
                "ids": table.lookups.ids + table.pushes.ids,
                **table.lookups.summary("lookup", "lookups"),
                **table.pushes.summary("push", "pushes"),
            }
            for table in self.tables[first:last]
        ]

    def _prepare_attach(self, message: Message) -> Change:
        spec, shard = _described(message.control)
        known = self._by_name.get(spec.name)
        if known is not None:
            number = self._same(known, spec, shard).number
            return lambda: {"table": number}
        if len(self.tables) >= MOST_TABLES:
            raise Refusal(Code.SIZE, f"this server has {MOST_TABLES} tables, which is the most")
        return lambda: {"table": self.create(spec, shard).number}

    def _same(self, known: Table, spec: TableSpec, shard: Shard) -> Table:
        if (known.spec, known.shard) != (spec, shard):
            raise Refusal(
                Code.TABLE,
                f"table {spec.name!r} is here as {known.spec}, {known.shard}, and was asked for as "
                f"{spec}, {shard}; give it another name, or the same description",
                table=spec.name,
            )
        return known

    def _checked_with_memory(self, message: Message) -> list[CheckedSection]:
        shares = checked(self.tables, message)
        new = [share.table.new_bytes(share.slots) for share in shares]
        self.budget.check(sum(new))
        for share, new_bytes in zip(shares, new, strict=True):
            if new_bytes:
                share.table.reserve()
        return shares


def _found(share: CheckedSection, values: NDArray[np.uint8], at: int) -> None:
    """Write what was asked for into a reply."""
    table, section = share.table, share.section
    if share.bags is None:
        out = np.ndarray((section.ids,), table.raw_dtype, values, at)
        table.read(share.ids, share.slots, out)
    elif section.bags:
        count = section.bags * table.spec.dim
        flat = torch.frombuffer(values, dtype=table.dtype, count=count, offset=at)
        share.bags.pooled(share.slots, flat.view(section.bags, table.spec.dim))


def _described(control: Mapping[str, Any]) -> tuple[TableSpec, Shard]:
    try:
        return TableSpec.from_json(control["table"]), Shard.from_json(control["shard"])
    except (KeyError, ConfigurationError) as error:
        raise Refusal(Code.TABLE, f"no description of a table: {error!r:.300}") from None
