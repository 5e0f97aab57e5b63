"""The native core and Python: the same answers, refusals, tables and meters for any message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.native import extension
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.protocol.wire import Dtype, Form, Frame, Head, Kind, Section, unpack
from paceline.ps.state.store import Store
from tests.examples import examples
from tests.ps.bare_server import (
    CLIENT,
    EMPTY,
    LOOKED_UP,
    OWNED,
    PLAIN,
    ROWS,
    BareServer,
    Step,
    check_same_answers,
    plain,
    steps,
)
from tests.ps.data_messages import pack_data
from tests.ps.killed_durable import close_as_killed

pytestmark = pytest.mark.skipif(
    extension.native is None, reason="needs the native core: a C compiler"
)


@settings(max_examples=examples(200))
@given(st.lists(steps, min_size=1, max_size=5))
def test_both_ways_are_the_same(drawn: list[Step]) -> None:
    servers = [BareServer(extension.native), BareServer(None)]
    for server in servers:
        server.keep()
    check_same_answers(*servers, drawn)


def native_server() -> BareServer:
    server = BareServer(extension.native)
    server.keep()
    return server


def kind_of(server: BareServer, frames: list[Frame]) -> Kind | None:
    """What the native core answers, or None: it is Python's."""
    server.store.clients.pin(CLIENT)
    found = server.store.answer_native(frames, None)
    return None if found is None else unpack(found).head.kind


@pytest.mark.parametrize(
    ("frames", "answer"),
    [
        (plain(Kind.LOOKUP, LOOKED_UP), Kind.FOUND),
        (plain(Kind.PUSH, PLAIN), Kind.DONE),
        (plain(Kind.LOOKUP, []), Kind.FOUND),
        (plain(Kind.LOOKUP, [0], ids=[4, 2, 4]), Kind.FOUND),
        (plain(Kind.PUSH, [0], ids=[4, 2, 8]), Kind.DONE),
        (plain(Kind.PUSH, [EMPTY], ids=[]), Kind.DONE),
    ],
    ids=["every dtype", "every optimizer", "nothing", "a row twice", "any order", "no row at all"],
)
def test_what_the_native_core_answers(frames: list[Frame], answer: Kind) -> None:
    assert kind_of(native_server(), frames) is answer


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (plain(Kind.LOOKUP, [0], ids=[1]), "a row that is not kept"),
        (plain(Kind.LOOKUP, [EMPTY], ids=[1]), "a table without storage"),
        (plain(Kind.LOOKUP, [9]), "max_norm"),
        (plain(Kind.PUSH, [8], ids=[3]), "the padding row, which is not kept"),
        (plain(Kind.PUSH, [4]), "another dtype"),
        (plain(Kind.PUSH, [0], 2), "a gap"),
        (plain(Kind.PUSH, [0], ids=[4, 2, 4]), "an id twice"),
        (plain(Kind.PUSH, [0, 0]), "a table twice"),
        (plain(Kind.WRITE, [0]), "WRITE"),
        (plain(Kind.LOOKUP, [0], ids=[-1]), "below"),
        (plain(Kind.LOOKUP, [0], ids=[ROWS]), "beyond"),
        (plain(Kind.LOOKUP, [2], ids=[0]), "another shard's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_pythons(frames: list[Frame], why: str) -> None:
    assert kind_of(native_server(), frames) is None, why


def test_a_padding_row_does_not_move() -> None:
    server = native_server()
    ids = [2, 3, 4]
    for sequence in (1, 2):  # the first keeps it
        assert unpack(server.ask(plain(Kind.PUSH, [8], sequence, ids))).head.kind is Kind.DONE
    assert kind_of(server, plain(Kind.PUSH, [8], 3, ids)) is Kind.DONE
    table = server.store.tables[8]
    slots = table.locate(np.array(ids))
    assert (slots > 0).all()
    rows = table.storage.kept()[0][slots - 1]
    assert not rows[1].any()
    assert rows[0].any()
    assert rows[2].any()


def test_large_messages_are_answered_too() -> None:
    store = Store(1 << 30, 1 << 30)
    spec = TableSpec("t", 10_000, 64)
    table = store.create(spec, Shard(Sharding.TABLE, 0, 1))
    all_ids = np.arange(10_000)
    table.materialise(all_ids, table.locate(all_ids))
    section = Section(0, Form.ROWS, Dtype.FLOAT32, len(all_ids))
    frames = pack_data(Head(Kind.LOOKUP, 1, CLIENT), [section], all_ids.tobytes(), b"")
    found = store.answer_native(frames, None)
    assert found is not None
    assert len(found[2]) == 10_000 * 256


def test_addresses_end_with_their_memory() -> None:
    """After a table was cleared nothing of it is found."""
    server = native_server()
    table = server.store.tables[0]
    table.clear()
    assert kind_of(server, plain(Kind.LOOKUP, [0])) is None
    few = np.array([4])
    table.materialise(few, table.locate(few))
    assert kind_of(server, plain(Kind.LOOKUP, [0], ids=[4])) is Kind.FOUND
    assert kind_of(server, plain(Kind.LOOKUP, [0], ids=[6])) is None


def test_a_fault_of_the_server_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts: its repetition hears the same, and the next push is no gap."""
    server = BareServer(None)

    def broken(*_: object) -> None:
        raise RuntimeError("bits fell out")

    monkeypatch.setattr("paceline.ps.state.table.update", broken)
    answer = server.ask(plain(Kind.PUSH, [0]))
    assert "bits fell out" in unpack(answer).control["text"]
    assert unpack(answer).control["code"] == "internal"
    monkeypatch.undo()
    assert server.ask(plain(Kind.PUSH, [0])) == answer
    assert unpack(server.ask(plain(Kind.PUSH, [0], 2))).head.kind is Kind.DONE


def test_meters_count_each_message() -> None:
    server = native_server()
    for sequence in range(1, 201):
        server.ask(plain(Kind.PUSH, [0, 1], sequence))
        server.ask(plain(Kind.LOOKUP, [0]))
    first, second = server.store.stats(0, 2)
    assert (first["pushes"], first["lookups"], second["pushes"]) == (200, 200, 200)
    assert first["lookup_ids"] == 200 * len(OWNED[0][::2])
    assert first["push_p50_us"] > 0
    server.store.forget_traffic()
    assert server.store.stats(0, 1)[0]["pushes"] == 0


@pytest.mark.parametrize("natively", [True, False], ids=["native first", "python first"])
def test_a_journal_is_replayed_either_way(tmp_path: Path, natively: bool) -> None:
    """Written by one way, replayed by the other: the same tables, down to the last bit."""
    ways = [extension.native, None] if natively else [None, extension.native]
    first = BareServer(ways[0], tmp_path)
    assert first.durable is not None
    for sequence in range(1, 6):  # the first keeps the rows
        push = plain(Kind.PUSH, PLAIN if sequence % 2 else [*LOOKED_UP, 9], sequence)
        for _ in range(2):
            assert unpack(first.ask(push)).head.kind is Kind.DONE
    close_as_killed(first.durable)
    second = BareServer(ways[1], tmp_path)
    assert second.durable is not None
    try:
        first.store.forget_traffic()
        assert second.state() == first.state()
        assert second.store.tables[0].step == 5
    finally:
        second.durable.close()
