"""Messages that are answered from ring to ring: the same answers and tables as Python's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ServerStateError
from paceline.native import extension
from paceline.ps.protocol.wire import Frame, Head, Kind, pack_control, read_head
from paceline.ps.server.dispatch import DeferredReply
from paceline.ps.server.native_loop import NativeLoop
from tests.examples import examples
from tests.ps.bare_server import CLIENT, PLAIN, BareServer, Step, check_same_answers, plain, steps
from tests.ps.killed_durable import close_as_killed
from tests.ps.protocol.test_shm_ring import Ends

pytestmark = pytest.mark.skipif(
    extension.native is None, reason="needs the native core: a C compiler"
)


class RingServer(BareServer):
    """A server whose only client is in shared memory; counts who answered."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(extension.native, directory)
        assert self.store.native_messages is not None
        self.ends = Ends(1 << 16)
        self.loop = NativeLoop(self.store.clients, self.store.native_messages, self.handler.append)
        trainer = SimpleNamespace(pair=self.ends.server, client=CLIENT)
        self.listener: Any = SimpleNamespace(event=self.ends.events[0], trainers={CLIENT: trainer})
        self.natively = self.by_python = 0

    def run_loop(self, timeout_ms: int = 0, fds: list[int] | None = None) -> None:
        self.loop.run(self.listener, fds or [], timeout_ms)

    def ask(self, frames: list[Frame]) -> list[bytes]:
        assert self.ends.trainer.send(list(frames))
        self.run_loop()
        found = self.ends.trainer.receive()
        if found is not None:
            self.natively += 1
            return [bytes(frame) for frame in found]
        self.by_python += 1
        answer = self.handler.answer(self.ends.server.receive())
        assert not isinstance(answer, DeferredReply)
        return [bytes(frame) for frame in answer]


@pytest.fixture
def ring() -> Iterator[RingServer]:
    made = RingServer()
    made.keep()
    yield made
    made.ends.close()


@settings(max_examples=examples(150))
@given(st.lists(steps, min_size=1, max_size=5))
def test_it_answers_as_python_does(drawn: list[Step]) -> None:
    ring, python = RingServer(), BareServer(None)
    python.store.clients.pin(CLIENT)
    try:
        ring.keep()
        python.keep()
        check_same_answers(ring, python, drawn)
    finally:
        ring.ends.close()


def test_what_is_plain_needs_no_python(ring: RingServer) -> None:
    for sequence in range(1, 400):  # more shares than fit before meters are settled
        ring.ask(plain(Kind.PUSH, PLAIN, sequence))
        ring.ask(plain(Kind.LOOKUP, PLAIN))
    assert (ring.natively, ring.by_python) == (2 * 399, 0)
    assert ring.store.clients.applied(CLIENT) == 399
    assert {ring.store.tables[number].step for number in PLAIN} == {399}
    assert ring.store.stats(0, 1)[0]["pushes"] == 399


def test_a_client_that_comes_again_has_new_memory(ring: RingServer) -> None:
    ring.ask(plain(Kind.PUSH, PLAIN, 1))
    ring.ends.close()
    ring.ends = Ends(1 << 16)
    ring.listener.event = ring.ends.events[0]
    ring.listener.trainers = {CLIENT: SimpleNamespace(pair=ring.ends.server, client=CLIENT)}
    ring.ask(plain(Kind.PUSH, PLAIN, 2))
    assert (ring.natively, ring.by_python) == (2, 0)


def test_several_messages_at_once_are_answered_in_order(ring: RingServer) -> None:
    for sequence in range(1, 40):
        assert ring.ends.trainer.send(plain(Kind.PUSH, PLAIN[:4], sequence))
        assert ring.ends.trainer.send(plain(Kind.LOOKUP, PLAIN[:4]))
    ring.run_loop()
    kinds = [read_head(ring.ends.trainer.receive()[0])[0].kind for _ in range(2 * 39)]
    assert kinds == [Kind.DONE, Kind.FOUND] * 39


def test_what_is_python_s_stays_in_the_ring(ring: RingServer) -> None:
    for frames in (
        plain(Kind.PUSH, [4], 1),  # another dtype: torch's
        plain(Kind.PUSH, [0], 5),  # a gap
        plain(Kind.LOOKUP, [9]),  # max_norm
        plain(Kind.PUSH, [0], 1)[:2],
        pack_control(Head(Kind.STATS, 1, CLIENT), {}),
    ):
        ring.ends.trainer.send(frames)
        ring.run_loop()
        assert ring.ends.trainer.receive() is None
        assert ring.ends.server.receive() == frames
    other = [frame.replace(CLIENT, b"d" * 16) for frame in plain(Kind.PUSH, [0], 1)]  # type: ignore[union-attr]
    ring.ends.trainer.send(other)
    ring.run_loop()
    assert ring.ends.server.receive() == other
    assert ring.store.clients.applied(CLIENT) == 0


def test_a_push_is_journaled_before_it_is_applied(tmp_path: Path) -> None:
    """Natively too: what is replayed, by Python alone, is what was acknowledged."""
    ring = RingServer(tmp_path)
    assert ring.durable is not None
    for sequence in range(1, 5):
        ring.ask(plain(Kind.PUSH, PLAIN, sequence))  # the first keeps the rows
    assert (ring.natively, ring.by_python) == (3, 1)
    ring.ends.close()
    close_as_killed(ring.durable)
    again = BareServer(None, tmp_path)
    assert again.durable is not None
    ring.store.forget_traffic()
    assert again.state() == ring.state()
    again.durable.close()


def test_what_the_journal_says_ends_the_loop(tmp_path: Path) -> None:
    """Nothing is applied or acknowledged then."""
    ring = RingServer(tmp_path)
    assert ring.durable is not None
    ring.ask(plain(Kind.PUSH, PLAIN, 1))

    def full(frames: Sequence[Frame]) -> None:
        raise ServerStateError("no room")

    ring.loop = NativeLoop(ring.store.clients, ring.store.native_messages, full)  # type: ignore[arg-type]
    before = ring.state()
    ring.ends.trainer.send(plain(Kind.PUSH, PLAIN, 2))
    with pytest.raises(ServerStateError, match="no room"):
        ring.run_loop()
    assert ring.ends.trainer.receive() is None
    assert ring.state() == before
    ring.ends.close()
    ring.durable.close()


def test_a_full_ring_of_replies_is_python_s(ring: RingServer) -> None:
    count = 0
    while True:
        ring.ends.trainer.send(plain(Kind.LOOKUP, PLAIN))
        ring.run_loop()
        if ring.ends.server.receive() is not None:
            break
        count += 1
    assert count > 10
    for _ in range(count):
        assert read_head(ring.ends.trainer.receive()[0])[0].kind is Kind.FOUND


def test_it_waits_until_somebody_else_has_something(ring: RingServer) -> None:
    reader, writer = os.pipe()
    try:
        began_s = time.monotonic()
        ring.run_loop(100, [reader])
        assert time.monotonic() - began_s > 0.09
        os.write(writer, b"x")
        ring.run_loop(3_600_000, [reader])  # if it sees nothing, the deadline of the test ends it
        with pytest.raises(ValueError, match="descriptors"):
            ring.run_loop(0, list(range(16)))
    finally:
        os.close(reader)
        os.close(writer)
