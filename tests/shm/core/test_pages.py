"""Pages: records are whole or not there, whoever dies, is stopped or writes nonsense."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from paceline.memory.segment import Mapping, create_segment
from paceline.printable import SHOWN_CHARACTERS, printable
from paceline.shm.core.pages import (
    HEAD_BYTES,
    MAX_TEXT_BYTES,
    PAGE_BYTES,
    RECORD_BYTES,
    Field,
    Pages,
)

WORLD = 3


class Segment:
    """A segment with pages, as several ranks of one process see it."""

    def __init__(self) -> None:
        descriptor = create_segment("paceline-test", 4096 + WORLD * PAGE_BYTES)
        self.mapping = Mapping(descriptor, 4096 + WORLD * PAGE_BYTES)
        os.close(descriptor)
        self.memory = memoryview(self.mapping.view(4096, WORLD * PAGE_BYTES)).cast("B")

    def pages(self, index: int) -> Pages:
        return Pages(self.mapping, 4096, index, WORLD)

    def record(self, index: int, field: Field, turn: int) -> memoryview:
        begin = index * PAGE_BYTES + HEAD_BYTES + (2 * field + turn) * RECORD_BYTES
        return self.memory[begin : begin + RECORD_BYTES]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment()
    yield made
    made.__dict__.clear()  # pytest keeps it longer than we want the memory


def test_the_page_has_room_for_all_fields() -> None:
    assert HEAD_BYTES + 2 * len(Field) * RECORD_BYTES <= PAGE_BYTES


def test_everybody_reads_what_a_rank_wrote_last(segment: Segment) -> None:
    mine = segment.pages(1)
    assert mine.read(1, Field.ENDING) is None
    for number in range(5):
        mine.write(Field.ENDING, {"text": f"number {number} \u2014"})
        for reader in range(WORLD):
            pages = segment.pages(reader)
            assert pages.read(1, Field.ENDING) == {"text": f"number {number} \u2014"}
            assert pages.read(0, Field.ENDING) is None
            assert pages.read(1, Field.ANSWER) is None


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_torn_record_leaves_the_one_before(segment: Segment, kept: int) -> None:
    """The writer dies after some bytes: at every place, a reader has the record before."""
    mine = segment.pages(0)
    for number in range(3):
        mine.write(Field.ANSWER, {"text": f"{number} " * 40})
    turn = 3 % 2
    before = bytes(segment.record(0, Field.ANSWER, turn - 1))
    old = bytes(segment.record(0, Field.ANSWER, turn))
    mine.write(Field.ANSWER, {"text": "4 " * 60})
    new = bytes(segment.record(0, Field.ANSWER, 0))
    assert new != before  # the fourth went where the second was
    segment.record(0, Field.ANSWER, 0)[:] = new[:kept] + before[kept:]
    assert segment.pages(2).read(0, Field.ANSWER) == {"text": "2 " * 40}
    assert bytes(segment.record(0, Field.ANSWER, turn)) == old


@pytest.mark.parametrize(
    "junk",
    [b"\xff" * RECORD_BYTES, struct.pack("<QII", 9, 1 << 31, 0), struct.pack("<QII", 9, 0, 0)],
)
def test_nonsense_is_nothing(segment: Segment, junk: bytes) -> None:
    for turn in (0, 1):
        segment.record(1, Field.REASON, turn)[: len(junk)] = junk
    assert segment.pages(0).read(1, Field.REASON) is None


def test_a_long_text_is_cut(segment: Segment) -> None:
    for text in ("a" * 5000, "\u2014" * 5000, '"' * 5000):
        segment.pages(0).write(Field.ENDING, {"text": text, "pid": 7})
        found = segment.pages(1).read(0, Field.ENDING)
        assert found is not None
        assert found["pid"] == 7
        assert len(found["text"]) > MAX_TEXT_BYTES // 4
        assert text.startswith(found["text"])


def test_a_forked_child_writes_nothing(segment: Segment) -> None:
    mine = segment.pages(0)
    mine.write(Field.ENDING, {"text": "parent"})
    pid = os.fork()
    if pid == 0:
        mine.write(Field.ENDING, {"text": "child"})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert mine.read(0, Field.ENDING) == {"text": "parent"}


def test_what_is_shown_cannot_upset_a_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nc\x00\u202e") == "a [2Jb \nc  "
    assert len(printable("x" * 10_000)) == SHOWN_CHARACTERS
