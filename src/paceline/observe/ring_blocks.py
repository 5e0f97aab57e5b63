"""A ring of blocks: keeps the newest records of any size, and lets readers find them.

Used by ring.py for steps, notes and bucket descriptions. Must not know what bodies mean.

[Note: a ring of blocks]
An area is cut into blocks. Records lie one behind the other in a block, from its begin, 8-byte
aligned. One that does not fit goes to the begin of the next block, and behind the last block comes
the first again: what the block held is forgotten, all of it, because nobody finds a record in the
middle. Numbers grow by one from record to record, in all blocks together.

A reader walks through each block from its begin as long as records are whole and their numbers are
consecutive. What lies behind the newest record of a block is old, so its number is not the next, or
its begin was overwritten, so it has no right checksum. A reader beside the writer may miss records;
it never sees one that was not written.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.observe.ring_layout import RECORD_HEAD, Blocks, decode_record, encode_record

_ALIGN = 8


class BlockWriter:
    """Appends records to one area. Not for several threads at once.

    A signal handler may append in the middle of an append: then one of the two records is lost.
    """

    def __init__(self, memory: memoryview, area: Blocks) -> None:
        self._memory = memory
        self._area = area
        self._body_bytes = area.body_bytes
        self._number = 1
        self._block = 0
        self._next = area.offset
        self._end = area.offset + area.block_bytes

    def append(self, body: bytes) -> None:
        """Write a record behind the newest.

        Raises:
            ValueError: It is larger than half a block.
        """
        if len(body) > self._body_bytes:
            raise ValueError(f"a record of {len(body)} bytes; {self._body_bytes} is the most")
        begin, number = self._next, self._number
        record = encode_record(number, body)
        end = begin + len(record)
        if end > self._end:
            begin = self._start_block()
            end = begin + len(record)
        self._memory[begin:end] = record
        self._number = number + 1
        self._next = -(-end // _ALIGN) * _ALIGN

    def _start_block(self) -> int:
        area = self._area
        self._block = (self._block + 1) % area.count
        begin = area.offset + self._block * area.block_bytes
        self._end = begin + area.block_bytes
        return begin


def read_blocks(data: bytes, area: Blocks) -> list[bytes]:
    """Return the bodies of all whole records of an area, oldest first. ``data`` may be cut off."""
    found = [
        record for block in range(area.count) for record in _walk(data, area, block) if record[0]
    ]
    return [body for _, body in sorted(found)]


def _walk(data: bytes, area: Blocks, block: int) -> Iterator[tuple[int, bytes]]:
    """Yield the records of one block, with their numbers."""
    offset = area.offset + block * area.block_bytes
    end = offset + area.block_bytes
    number, body = decode_record(data, offset, end)
    while number:
        yield number, body
        offset += -(-(RECORD_HEAD.size + len(body)) // _ALIGN) * _ALIGN
        expected = number + 1
        number, body = decode_record(data, offset, end)
        if number != expected:
            return
