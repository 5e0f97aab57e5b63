"""Servers without a socket, tables of all kinds and messages for them, plain and damaged.

For the tests that compare the native core with Python: ``tests/ps/state/test_native_messages.py``
(messages one by one) and ``tests/ps/server/test_native_loop.py`` (from ring to ring).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from paceline import ps
from paceline.native import extension
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
)
from paceline.ps.server.dispatch import DeferredReply, Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from tests.ps.data_messages import pack_data

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


class BareServer:
    """A server without a socket; some rows of its tables are kept."""

    def __init__(self, native: Any, directory: Path | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extension, "native", native)
            self.store = Store(1 << 20, 1 << 12)
            for spec, shard in TABLES:
                self.store.create(spec, shard)
        self.durable = None if directory is None else Durable(directory, self.store, fsync=False)
        place = SaveRoot(None)
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


def check_same_answers(native: BareServer, python: BareServer, drawn: Sequence[Step]) -> None:
    """Let both answer the same messages: the answers are the same, and so is what is left."""
    for message, how, what in drawn:
        answers = []
        for server in (native, python):
            if what < 2:
                server.store.tables[what].clear()
            sequence = server.store.clients.applied(CLIENT) + 1
            sequence += {2: 1, 3: -1}.get(what, 0)  # a gap; again, or none
            answers.append(server.ask(framed(message, max(0, sequence), how)))
        assert answers[0] == answers[1]
    assert native.state() == python.state()
