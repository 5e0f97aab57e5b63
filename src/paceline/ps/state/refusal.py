"""Why a server does not do what it was asked: raised inside the server, sent as ERROR.

Raised by table, store and files; turned into a message by ``ps/server/loop.py``. A refusal is an
answer, not a failure: nothing was changed, and the server goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any


class Code(enum.Enum):
    """What kind of refusal; goes over the wire by its value."""

    WIRE = "wire"
    """These bytes are no message."""
    VERSION = "version"
    """A message of another version of the protocol."""
    TABLE = "table"
    """No such table, or it is another one than the client believes."""
    ID = "id"
    """An id out of range, of another shard, or twice in one push."""
    GAP = "gap"
    """A sequence number is missing before this one."""
    SIZE = "size"
    """More memory, or a larger reply, than this server is allowed."""
    SAVE = "save"
    """A table could not be written."""
    LOAD = "load"
    """A saved table could not be read."""
    INTERNAL = "internal"
    """A fault of the server; its log has the traceback."""


_TEXT = 4000


class Refusal(Exception):
    """An answer of kind ERROR.

    Args:
        code: What kind.
        text: What was found, what was expected, what to do.
        table: The table's name, where there is one.
        id: The row's id, where there is one.
    """

    def __init__(
        self, code: Code, text: str, *, table: str | None = None, id: int | None = None
    ) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.table = table
        self.id = id

    def to_json(self) -> dict[str, Any]:
        """The control part of an ERROR message."""
        text = self.text[:_TEXT]  # several go into one message
        return {"code": self.code.value, "text": text, "table": self.table, "id": self.id}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Refusal:
        """The inverse of ``to_json``."""
        return cls(Code(found["code"]), found["text"], table=found["table"], id=found["id"])
