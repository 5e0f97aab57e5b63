"""A page for each rank of a host: small records that its rank writes and everybody may read.

The pages lie behind the native channels in the control segment. Python owns them; the native core
knows one word.

    page of one rank, PAGE_BYTES
    +------------------+-------------------+-------------------+-----
    | doorbell, a futex    | ENDING, record 0  | ENDING, record 1  | ANSWER, record 0 ...
    | HEAD_BYTES       | RECORD_BYTES      |                   |
    +------------------+-------------------+-------------------+-----
    record: number (8 bytes), size (4), CRC-32 of number, size and text (4), text (JSON)

[Note: who writes a page]
The records are written by their own rank alone. A field has two records, written in turn with
growing numbers; a reader copies a record and believes it only if its checksum is right, and takes
the one with the higher number. So a rank that dies or is stopped in the middle of a write leaves
the record before it, a reader never waits, and no order of stores is relied on. The doorbell is
counted up by anybody (``native.ring_doorbell``). What a record says is not trusted: it is bounded,
its types are checked where it is used, and ``printable`` takes out what could upset a terminal.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import threading
import zlib
from typing import Any

from paceline.memory.segment import Mapping

PAGE_BYTES = 8192
HEAD_BYTES = 128
RECORD_BYTES = 1344
_HEAD = struct.Struct("<QII")
MAX_TEXT_BYTES = RECORD_BYTES - _HEAD.size


class Field(enum.IntEnum):
    """What a page has records of; the value says where."""

    ENDING = 0
    """How the rank ends: :class:`paceline.shm.diagnose.status.Ending`."""

    ANSWER = 1
    """What the rank is doing, written when somebody rings its doorbell."""

    REASON = 2
    """Why this rank ended the group, where the native verdict has no words for it."""


class Pages:
    """The pages of all ranks of a host.

    Args:
        mapping: The control segment.
        offset: Where the pages begin in it.
        index: Whose page is ours.
        world: How many ranks there are.
    """

    def __init__(self, mapping: Mapping, offset: int, index: int, world: int) -> None:
        self._memory = memoryview(mapping.view(offset, world * PAGE_BYTES)).cast("B")
        self._address = mapping.address + offset
        self._owner_pid = os.getpid()
        # Reentrant: a signal handler may write in the middle of a write.
        self._lock = threading.RLock()
        self._number = 0
        self.index = index
        self.world = world

    def doorbell_address(self, index: int) -> int:
        """Where a rank's doorbell is."""
        return self._address + index * PAGE_BYTES

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that the page belongs to."""
        return os.getpid() != self._owner_pid

    def write(self, field: Field, value: dict[str, Any]) -> None:
        """Publish a record in this rank's page; a forked child has no page.

        The value's ``text`` is cut if there is no room for it.
        """
        if self.is_forked:
            return
        with self._lock:
            self._number += 1
            number, text = self._number, _encode(value)
            begin = _begin(self.index, field, number % 2)
            head = _HEAD.pack(number, len(text), _checksum(number, text))
            self._memory[begin : begin + _HEAD.size + len(text)] = head + text

    def read(self, index: int, field: Field) -> dict[str, Any] | None:
        """Return the newest whole record of a rank; None if there is none."""
        found = [self._read_one(_begin(index, field, turn)) for turn in (0, 1)]
        best = max(found, key=lambda each: each[0])
        return best[1] if best[0] else None

    def _read_one(self, begin: int) -> tuple[int, dict[str, Any]]:
        record = bytes(self._memory[begin : begin + RECORD_BYTES])
        number, size, checksum = _HEAD.unpack_from(record)
        text = record[_HEAD.size : _HEAD.size + min(size, MAX_TEXT_BYTES)]
        if number == 0 or len(text) != size or checksum != _checksum(number, text):
            return 0, {}
        try:
            value = json.loads(text)
        except ValueError:
            return 0, {}
        return (number, value) if isinstance(value, dict) else (0, {})


def _begin(index: int, field: Field, turn: int) -> int:
    return index * PAGE_BYTES + HEAD_BYTES + (2 * field + turn) * RECORD_BYTES


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(struct.pack("<QI", number, len(text))))


def _encode(value: dict[str, Any]) -> bytes:
    text = str(value.get("text", ""))[:MAX_TEXT_BYTES]
    while len(encoded := _to_json(value | {"text": text})) > MAX_TEXT_BYTES:
        if not text:
            raise ValueError(f"a record of {len(encoded)} bytes does not fit into a page")
        # A character takes up to 6 bytes: never cut more than there is too much.
        text = text[: len(text) - max((len(encoded) - MAX_TEXT_BYTES) // 6, 1)]
    return encoded


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
