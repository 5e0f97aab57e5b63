"""Rings of messages in shared memory: a model, two processes, kills, and somebody who lies.

Also under sanitizers, in ``native_stress``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.native.extension import native
from tests.examples import examples
from tests.ps.protocol.ring_peer import frames_of

pytestmark = pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")

CAPACITY = 1 << 13
PEER = Path(__file__).with_name("ring_peer.py")


class Ends:
    """Both ends of a pair, and the memory between them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.memory = os.memfd_create("test")
        os.ftruncate(self.memory, native.DATA_OFFSET + 2 * capacity)
        self.events = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.server = native.Pair(self.memory, capacity, *self.events, True)
        self.trainer = native.Pair(self.memory, capacity, *reversed(self.events), False)
        self.capacity = capacity

    def close(self) -> None:
        self.server.close()
        self.trainer.close()
        for descriptor in (self.memory, *self.events):
            os.close(descriptor)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


FRAMES = st.lists(st.integers(0, CAPACITY // 4), min_size=1, max_size=3)


@settings(max_examples=examples(150))
@given(st.lists(st.one_of(FRAMES, st.none(), st.just("mark")), max_size=80))
def test_it_is_a_queue(steps: list[Any]) -> None:
    """None takes one out; what comes out went in, in order; an empty ring takes what is allowed."""
    made = Ends()
    model: deque[list[bytes]] = deque()
    try:
        for number, step in enumerate(steps):
            if step is None:
                found = made.server.receive()
                expected = model.popleft() if model else None
                assert found == expected
                continue
            frames = [] if step == "mark" else [bytes([number % 256]) * size for size in step]
            record = 40 + sum(-(-len(frame) // 8) * 8 for frame in frames)
            is_in = made.trainer.mark() if step == "mark" else made.trainer.send(frames)
            if is_in:
                model.append(frames)
            assert is_in <= (record <= CAPACITY // 2)
            assert is_in or model or record > CAPACITY // 2
        while model:
            assert made.server.receive() == model.popleft()
        assert made.server.receive() is None
    finally:
        made.close()


def test_both_ways_at_once(ends: Ends) -> None:
    for number in range(500):
        assert ends.trainer.send([b"question", number.to_bytes(4, "little")])
        assert ends.server.receive() == [b"question", number.to_bytes(4, "little")]
        assert ends.server.send([b"answer"])
        assert ends.trainer.receive() == [b"answer"]


@contextlib.contextmanager
def writer(ends: Ends, count: int) -> Iterator[subprocess.Popen[bytes]]:
    words = [native.__file__, ends.memory, ends.capacity, ends.events[1], ends.events[0], count]
    process = subprocess.Popen(
        [sys.executable, str(PEER), *map(str, words)], pass_fds=[ends.memory, *ends.events]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_another_process_writes(ends: Ends) -> None:
    """With sleeps in between: no wake-up is missed."""
    count = 20_000
    reader, unused = os.pipe()
    try:
        with writer(ends, count) as process:
            for number in range(count):
                found = ends.server.receive()
                while found is None:
                    ends.server.wait(reader, 20_000)
                    found = ends.server.receive()
                assert found == frames_of(number)
            assert process.wait(60) == 0
    finally:
        os.close(reader)
        os.close(unused)


def test_a_writer_is_killed_anywhere() -> None:
    """What has been seen is whole, and nothing is missing before it."""
    chance = random.Random(1)
    seen = 0
    for _ in range(25):
        ends = Ends()
        try:
            with writer(ends, -1) as process:
                number = 0
                until = chance.randrange(3, 2000)
                while number < until:
                    number += _is_next(ends, number)
                process.kill()
                process.wait()
                while _is_next(ends, number):
                    number += 1
            seen += number
        finally:
            ends.close()
    assert seen > 1000


def _is_next(ends: Ends, number: int) -> bool:
    found = ends.server.receive()
    assert found is None or found == frames_of(number)
    return found is not None


WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 4 * CAPACITY),
    st.sampled_from([2**64 - 1, 2**63, CAPACITY, CAPACITY + 8, 1, 2, 3, 40, 41, 48]),
)


@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.integers(0, 700), WORDS), min_size=1, max_size=6),
    st.lists(FRAMES, max_size=6),
)
def test_somebody_lies(lies: list[tuple[int, int]], messages: list[list[int]]) -> None:
    """Any word may change at any time: an error, or bytes of the ring; never more, never a crash.

    A word below 64 is one of the counts' page, the others are of the ring of requests.
    """
    made = Ends()
    with mmap.mmap(made.memory, native.DATA_OFFSET + 2 * CAPACITY) as memory:
        try:
            for sizes in messages:
                made.trainer.send([b"x" * size for size in sizes])
            for place, word in lies:
                at = 8 * place if place < 64 else native.DATA_OFFSET + 8 * (place - 64)
                memory[at : at + 8] = word.to_bytes(8, "little")
                _use(made)
        finally:
            made.close()


def _use(ends: Ends) -> None:
    for _ in range(4):
        with contextlib.suppress(ValueError):
            found = ends.server.receive()
            assert found is None or sum(map(len, found)) <= CAPACITY
    ends.server.prepare_sleep()
    ends.server.send([b"reply" * 40])
    ends.trainer.send([b"more"])


def test_what_is_no_pair_is_refused(ends: Ends) -> None:
    for capacity in (0, 1, CAPACITY // 2, CAPACITY + 1, 1 << 62, 2**64 - 4096):
        with pytest.raises((ValueError, OverflowError)):
            native.Pair(ends.memory, capacity, *ends.events, False)
    empty = os.memfd_create("test")
    os.ftruncate(empty, native.DATA_OFFSET + 2 * CAPACITY)
    with pytest.raises(ValueError, match="version"):
        native.Pair(empty, CAPACITY, *ends.events, False)
    os.close(empty)
    with pytest.raises(OSError, match="descriptor"):
        native.Pair(empty, CAPACITY, *ends.events, False)
    for frames in ([], [b""] * 4, (b"",), [3], None):
        with pytest.raises((ValueError, TypeError)):
            ends.trainer.send(frames)
    ends.trainer.close()
    for call in (ends.trainer.receive, ends.trainer.prepare_sleep, ends.trainer.mark):
        with pytest.raises(ValueError, match="closed"):
            call()
