"""Where things lie in a file of records. Described here and nowhere else; changes raise VERSION.

Used by ring.py, which reads and writes such files. Pure: knows sizes, opens nothing.

    offset      bytes    area
    0           4 KiB    HEAD     magic, version, size of the file, CRC-32 of these; written once
    4 KiB       4 KiB    STATUS   activity word, step, activity word before the end (8 bytes each),
                                  from 64 on two records
    8 KiB      24 KiB    INFO     two records
    32 KiB     96 KiB    NOTES    6 blocks of 16 KiB
    128 KiB   512 KiB    BUCKETS  4 blocks of 128 KiB
    640 KiB  the rest    STEPS    blocks of 64 KiB

All numbers are little-endian. A *record* is

    number (8 bytes), size of the body (4), CRC-32 of number, size and body (4), body

[Note: who writes a file of records]
One process writes: the rank that made the file. Everybody of the same user may read, at any time
and without a lock; the writer may be dead, or stopped in the middle of a write. So no reader waits,
and none relies on the order of stores: it copies, and believes what has the right checksum.

* HEAD is complete before the file gets its name.
* The activity word is one aligned store of 8 bytes: nanoseconds since when, but for the lowest 12
  bits, of which 4 say the activity and 8 the step modulo 256. The step, one more store of 8 bytes,
  is written before it. These two have no checksum. A reader that comes between the stores, or
  after a writer that died there, takes the step next to it that fits the activity word. What the
  activity word was before the process ended is kept beside them; 0 until then.
* STATUS and INFO have two records, written in turn with growing numbers. The one with the higher
  number counts. A write that was cut off leaves the one before it.
* NOTES, BUCKETS and STEPS are rings of blocks (ring_blocks.py).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"pacering"
VERSION = 1
DEFAULT_BYTES = 8 << 20
"""5,000 steps take a quarter of it with 6 buckets, and all of it with 40."""

MIN_BYTES = 1 << 20
MAX_BYTES = 1 << 30
"""What a reader believes a file to be at most."""

HEAD = struct.Struct("<8sIxxxxQ")
HEAD_CRC = struct.Struct("<I")
RECORD_HEAD = struct.Struct("<QII")
_NUMBER_AND_SIZE, _CRC = struct.Struct("<QI"), struct.Struct("<I")

ACTIVITY_BITS = 4
STEP_BITS = 8
STEP_MASK = (1 << STEP_BITS) - 1
STAMP_MASK = ~((1 << (ACTIVITY_BITS + STEP_BITS)) - 1)


@dataclass(frozen=True)
class Pair:
    """An area with two records, written in turn."""

    offset: int
    record_bytes: int

    @property
    def body_bytes(self) -> int:
        """The largest body."""
        return self.record_bytes - RECORD_HEAD.size


@dataclass(frozen=True)
class Blocks:
    """An area that is a ring of blocks."""

    offset: int
    count: int
    block_bytes: int

    @property
    def body_bytes(self) -> int:
        """The largest body that may be written: half of a block, so that little is wasted."""
        return self.block_bytes // 2 - RECORD_HEAD.size


ACTIVITY_OFFSET = 4 << 10
STATUS = Pair(ACTIVITY_OFFSET + 64, 1984)
INFO = Pair(8 << 10, 12 << 10)
NOTES = Blocks(32 << 10, 6, 16 << 10)
BUCKETS = Blocks(128 << 10, 4, 128 << 10)
_STEPS_OFFSET = 640 << 10
_STEPS_BLOCK = 64 << 10
FIRST_PAGES = INFO.offset + 2 * INFO.record_bytes
"""Bytes from the begin that hold head, status and info."""


def steps_area(file_bytes: int) -> Blocks:
    """Return where the steps lie in a file of this size."""
    return Blocks(_STEPS_OFFSET, (file_bytes - _STEPS_OFFSET) // _STEPS_BLOCK, _STEPS_BLOCK)


def encode_head(file_bytes: int) -> bytes:
    """Return what a file begins with."""
    head = HEAD.pack(MAGIC, VERSION, file_bytes)
    return head + HEAD_CRC.pack(zlib.crc32(head))


def encode_record(number: int, body: bytes) -> bytes:
    """Return a record."""
    head = _NUMBER_AND_SIZE.pack(number, len(body))
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def decode_record(data: bytes | memoryview, offset: int, limit: int) -> tuple[int, bytes]:
    """Return number and body of the record at ``offset``; number 0 if there is none.

    Args:
        data: Part of a file.
        offset: In ``data``.
        limit: The record ends there, or before.
    """
    limit = min(limit, len(data))
    begin = offset + RECORD_HEAD.size
    if begin > limit:
        return 0, b""
    number, size, crc = RECORD_HEAD.unpack_from(data, offset)
    if number == 0 or size > limit - begin:
        return 0, b""
    body = bytes(data[begin : begin + size])
    return (number, body) if crc == checksum(number, body) else (0, b"")


def checksum(number: int, body: bytes) -> int:
    """CRC-32 of a record."""
    return zlib.crc32(body, zlib.crc32(_NUMBER_AND_SIZE.pack(number, len(body))))
