"""The native core and Python: the same answers, refusals, tables and meters for any message."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import ps
from paceline.native import extension
from paceline.ps.protocol import wire
from paceline.ps.protocol.table_spec import Init, Shard, Sharding, Start, TableSpec
from paceline.ps.protocol.wire import (
    Dtype,
    Form,
    Frame,
    Head,
    Kind,
    Mode,
    Section,
    aligned,
    pack_section,
    unpack,
)
from paceline.ps.server.dispatch import DeferredReply, Handler
from paceline.ps.server.save_root import SavePlace
from paceline.ps.state import native_table
from paceline.ps.state.clients import ACCOUNT
from paceline.ps.state.plain_messages import TALLY
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from tests.ps.data_messages import pack_data
from tests.ps.forsaken import forsake

pytestmark = pytest.mark.skipif(
    extension.native is None, reason="needs the native core: a C compiler"
)

CLIENT = b"c" * 16
ROWS = 24
HALF = Init(Start.UNIFORM, -1.0, 1.0, 7)
TABLES = [
    (TableSpec("sgd", ROWS, 4, optimizer=ps.SGD(1.0)), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("alike", ROWS, 4, optimizer=ps.SGD(1.0), init=HALF), Shard(Sharding.HASH, 0, 2)),
    (TableSpec("odd", ROWS, 3, optimizer=ps.SGD(1.0)), Shard(Sharding.RANGE, 1, 2)),
    (TableSpec("odd2", ROWS, 3, optimizer=ps.SGD(1.0)), Shard(Sharding.TABLE, 1, 2)),
    (TableSpec("adam", ROWS, 4, Dtype.FLOAT64, ps.Adam()), Shard(Sharding.HASH, 0, 1)),
    (TableSpec("adam2", ROWS, 4, Dtype.FLOAT64, ps.Adam()), Shard(Sharding.HASH, 0, 1)),
    (
        TableSpec("rowwise", ROWS, 1, Dtype.FLOAT16, ps.RowwiseAdagrad()),
        Shard(Sharding.TABLE, 0, 1),
    ),
    (TableSpec("ada", ROWS, 5, Dtype.BFLOAT16, ps.Adagrad()), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("padded", ROWS, 4, padding_idx=3), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("normed", ROWS, 4, max_norm=0.5), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("ada32", ROWS, 4, optimizer=ps.Adagrad()), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("row32", ROWS, 9, optimizer=ps.RowwiseAdagrad()), Shard(Sharding.HASH, 0, 2)),
    (TableSpec("adam32", ROWS, 3, optimizer=ps.Adam()), Shard(Sharding.TABLE, 0, 1)),
    (TableSpec("empty", ROWS, 4, optimizer=ps.SGD(1.0)), Shard(Sharding.TABLE, 0, 1)),
]


class Way:
    """A server without a socket; some rows of its tables are kept."""

    def __init__(self, native: Any, directory: Path | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extension, "native", native)
            self.store = Store(1 << 20, 1 << 12)
            for spec, shard in TABLES:
                self.store.create(spec, shard)
        self.durable = None if directory is None else Durable(directory, self.store, fsync=False)
        place = SavePlace(None)
        self.handler = Handler(self.store, self.durable, place)

    def keep(self) -> None:
        for table in self.store.tables[:-1]:
            ids = owned(table.number)[::2]
            table.materialise(ids, table.locate(ids))

    def ask(self, frames: list[Frame]) -> list[bytes]:
        answer = self.handler.answer(frames)
        assert not isinstance(answer, DeferredReply)
        return [bytes(frame) for frame in answer]

    def state(self) -> list[Any]:
        found: list[Any] = [self.store.budget.used_bytes]
        for name, client in self.store.clients.items():
            refusals = {key: each.to_json() for key, each in (client.refusals or {}).items()}
            found.append([name, client.applied, refusals])
        for table, stats in zip(self.store.tables, self.store.stats(0, 99), strict=True):
            counts = [stats[key] for key in ("lookups", "lookup_ids", "pushes", "push_ids")]
            found += [table.step, table.count, counts]
            if table.count:
                kept = [each.contiguous().view(torch.uint8) for each in table.storage.kept()]
                found += [table.storage.ids().tolist(), *(each.tolist() for each in kept)]
        return found


def owned(number: int) -> np.ndarray:
    """The ids of a table that its shard has."""
    store = Store(1 << 20, 1 << 12)
    table = store.create(*TABLES[number])
    found = []
    for id in range(ROWS):
        try:
            table.locate(np.array([id]))
            found.append(id)
        except Refusal:
            continue
    return np.array(found)


OWNED = [owned(number) for number in range(len(TABLES))]


def sizable(length: int, seed: int) -> bytes:
    """So many bytes that are numbers of about 0.01 to 2 in each of the types."""
    found = np.random.default_rng(seed).integers(0, 0x80, length).astype(np.uint8)
    found[1::2] = 0x3C + found[1::2] % 4
    found[7::8] = 0x3F
    return found.tobytes()


@st.composite
def sections(draw: st.DrawFn) -> tuple[Section, list[int]]:
    """Mostly plain, and of kept rows."""
    number = draw(st.integers(0, len(TABLES) - 1))
    spec, _ = TABLES[number]
    kept = OWNED[number][::2].tolist()
    some = st.lists(st.sampled_from(kept), max_size=6, unique=True)
    wild = st.lists(st.integers(-2, ROWS + 1) | st.integers(-(2**63), 2**63 - 1), max_size=3)
    ids = draw(st.one_of(some, some.map(sorted), some, some, wild))
    lr = draw(st.sampled_from([0.5] * 8 + [0.0, 0.25, -1.0, float("nan"), float("inf")]))
    dtype = draw(st.sampled_from([spec.dtype] * 15 + [Dtype.FLOAT32]))
    table = draw(st.sampled_from([number] * 15 + [len(TABLES)]))
    section = Section(table, Form.ROWS, dtype, len(ids), lr=lr)
    if draw(st.integers(0, 15)) == 0:
        section = section._replace(form=Form.BAGS, mode=Mode.SUM, bags=1)
        ids = [*ids, 0]
    return section, ids


@st.composite
def messages(draw: st.DrawFn) -> tuple[Kind, bytes, bytes, bytes]:
    """Kind, records, integers, values; sometimes damaged."""
    kind = draw(st.sampled_from([Kind.LOOKUP, Kind.PUSH, Kind.PUSH, Kind.WRITE]))
    parts = draw(st.lists(sections(), max_size=4))
    integers = np.array([id for _, ids in parts for id in ids], np.int64).tobytes()
    length = 0
    if kind is not Kind.LOOKUP:
        dims = [TABLES[section.table % len(TABLES)][0].dim for section, _ in parts]
        length = sum(s.rows_bytes(dim) for (s, _), dim in zip(parts, dims, strict=True))
    length = max(0, length + draw(st.sampled_from([0] * 12 + [8, -8, 1])))
    values = sizable(length, draw(st.integers(0, 99)))
    records = b"".join(pack_section(section) for section, _ in parts)
    frames = [records, integers]
    which = draw(st.integers(0, 19))
    if which < 2 and frames[which]:
        at = draw(st.integers(0, len(frames[which]) - 1))
        damaged = bytearray(frames[which])
        damaged[at] = draw(st.integers(0, 255))
        frames[which] = bytes(damaged)
    elif which < 4:
        frames[which - 2] = frames[which - 2][: draw(st.integers(0, 40))]
    return kind, *frames, values


def framed(message: tuple[Kind, bytes, bytes, bytes], sequence: int, how: int) -> list[Frame]:
    """A message as it can arrive: frames of several types."""
    kind, records, integers, values = message
    head = Head(kind, 9, CLIENT, 0 if kind is Kind.LOOKUP else sequence)
    count = len(records) // 32
    first = pack_data(head, [Section(0, Form.ROWS, Dtype.FLOAT32, 0)] * count, b"", b"")[0]
    frames: list[Frame] = [bytes(first[:48]) + records, integers, values]
    if how == 1:
        return [bytearray(frame) for frame in frames]
    if how == 2:  # anywhere in a longer buffer
        return [memoryview(bytearray(b"x" + frame + b"y"))[1:-1] for frame in frames]
    return frames


Step = tuple[tuple[Kind, bytes, bytes, bytes], int, int]
steps = st.tuples(messages(), st.integers(0, 2), st.integers(0, 30))


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, min_size=1, max_size=5))
def test_both_ways_are_the_same(drawn: list[Step]) -> None:
    ways = [Way(extension.native), Way(None)]
    for way in ways:
        way.keep()
    for message, how, what in drawn:
        answers = []
        for way in ways:
            if what < 2:
                way.store.tables[what].clear()
            sequence = way.store.clients.applied(CLIENT) + 1
            sequence += {2: 1, 3: -1}.get(what, 0)  # a gap; again, or none
            answers.append(way.ask(framed(message, max(0, sequence), how)))
        assert answers[0] == answers[1]
    assert ways[0].state() == ways[1].state()


def plain(
    kind: Kind, numbers: Sequence[int], sequence: int = 1, ids: Sequence[int] | None = None
) -> list[Frame]:
    """A message for the kept rows of these tables."""
    parts, values = [], b""
    for number in numbers:
        spec, _ = TABLES[number]
        wanted = OWNED[number][::2].tolist() if ids is None else list(ids)
        parts.append((Section(number, Form.ROWS, spec.dtype, len(wanted), lr=0.5), wanted))
        length = aligned(len(wanted) * spec.dim * spec.dtype.itemsize)
        values += b"" if kind is Kind.LOOKUP else sizable(length, number)
    integers = np.array([id for _, each in parts for id in each], np.int64).tobytes()
    head = Head(kind, 9, CLIENT, 0 if kind is Kind.LOOKUP else sequence)
    return pack_data(head, [section for section, _ in parts], integers, values)


OF_TORCH = ("adam", "adam2", "rowwise", "ada")  # other dtypes
LOOKED_UP = [n for n, (spec, _) in enumerate(TABLES) if spec.name not in ("normed", "empty")]
PLAIN = [number for number in LOOKED_UP if TABLES[number][0].name not in OF_TORCH]
EMPTY = len(TABLES) - 1


def native_way() -> Way:
    way = Way(extension.native)
    way.keep()
    return way


def kind_of(way: Way, frames: list[Frame]) -> Kind | None:
    """What the native core answers, or None: it is Python's."""
    way.store.clients.pin(CLIENT)
    found = way.store.answer_plain(frames, None)
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
    assert kind_of(native_way(), frames) is answer


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
    assert kind_of(native_way(), frames) is None, why


def test_a_padding_row_does_not_move() -> None:
    way = native_way()
    ids = [2, 3, 4]
    for sequence in (1, 2):  # the first keeps it
        assert unpack(way.ask(plain(Kind.PUSH, [8], sequence, ids))).head.kind is Kind.DONE
    assert kind_of(way, plain(Kind.PUSH, [8], 3, ids)) is Kind.DONE
    table = way.store.tables[8]
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
    found = store.answer_plain(frames, None)
    assert found is not None
    assert len(found[2]) == 10_000 * 256


def test_addresses_end_with_their_memory() -> None:
    """After a table was cleared nothing of it is found."""
    way = native_way()
    table = way.store.tables[0]
    table.clear()
    assert kind_of(way, plain(Kind.LOOKUP, [0])) is None
    few = np.array([4])
    table.materialise(few, table.locate(few))
    assert kind_of(way, plain(Kind.LOOKUP, [0], ids=[4])) is Kind.FOUND
    assert kind_of(way, plain(Kind.LOOKUP, [0], ids=[6])) is None


def offsets(layout: str) -> list[int]:
    """Where each field of a struct begins, and its size."""
    fields = re.findall(r"(\d*)([a-zA-Z])", layout.removeprefix("<"))
    each = [f"{n}s" if code == "s" else code for n, code in fields for _ in range(repeats(n, code))]
    return [struct.calcsize("<" + "".join(each[:end])) for end in range(len(each) + 1)]


def repeats(number: str, code: str) -> int:
    return 1 if code == "s" or not number else int(number)


def test_layouts_are_those_of_the_native_core() -> None:
    layouts = {
        "pl_head": wire.HEAD.format,
        "pl_record": wire.SECTION.format,
        "pl_entry": native_table.LAYOUT,
        "pl_account": ACCOUNT.format,
        "pl_tally": TALLY.format,
    }
    found = {
        name: np.frombuffer(each, np.uint32).tolist()
        for name, each in extension.native.layouts().items()
    }
    assert found == {name: offsets(layout) for name, layout in layouts.items()}


def test_a_fault_of_the_server_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts: its repetition hears the same, and the next push is no gap."""
    way = Way(None)

    def broken(*_: object) -> None:
        raise RuntimeError("bits fell out")

    monkeypatch.setattr("paceline.ps.state.table.update", broken)
    answer = way.ask(plain(Kind.PUSH, [0]))
    assert "bits fell out" in unpack(answer).control["text"]
    assert unpack(answer).control["code"] == "internal"
    monkeypatch.undo()
    assert way.ask(plain(Kind.PUSH, [0])) == answer
    assert unpack(way.ask(plain(Kind.PUSH, [0], 2))).head.kind is Kind.DONE


def test_meters_count_each_message() -> None:
    way = native_way()
    for sequence in range(1, 201):
        way.ask(plain(Kind.PUSH, [0, 1], sequence))
        way.ask(plain(Kind.LOOKUP, [0]))
    first, second = way.store.stats(0, 2)
    assert (first["pushes"], first["lookups"], second["pushes"]) == (200, 200, 200)
    assert first["lookup_ids"] == 200 * len(OWNED[0][::2])
    assert first["push_p50_us"] > 0
    way.store.forget_traffic()
    assert way.store.stats(0, 1)[0]["pushes"] == 0


@pytest.mark.parametrize("natively", [True, False], ids=["native first", "python first"])
def test_a_journal_is_replayed_either_way(tmp_path: Path, natively: bool) -> None:
    """Written by one way, replayed by the other: the same tables, down to the last bit."""
    ways = [extension.native, None] if natively else [None, extension.native]
    first = Way(ways[0], tmp_path)
    assert first.durable is not None
    for sequence in range(1, 6):  # the first keeps the rows
        push = plain(Kind.PUSH, PLAIN if sequence % 2 else [*LOOKED_UP, 9], sequence)
        for _ in range(2):
            assert unpack(first.ask(push)).head.kind is Kind.DONE
    forsake(first.durable)
    second = Way(ways[1], tmp_path)
    assert second.durable is not None
    try:
        first.store.forget_traffic()
        assert second.state() == first.state()
        assert second.store.tables[0].step == 5
    finally:
        second.durable.close()
