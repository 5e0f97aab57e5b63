"""What a server answers, without a socket: refusals, limits, repetitions, and any input at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import ps
from paceline.ps.protocol.table_spec import Init, Shard, Sharding, Start, TableSpec
from paceline.ps.protocol.wire import (
    Dtype,
    Form,
    Head,
    Kind,
    Message,
    Mode,
    Section,
    pack_control,
    unpack,
)
from paceline.ps.server.dispatch import DeferredReply, Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.store import Store
from tests.examples import examples
from tests.ps.data_messages import pack_data
from tests.ps.raw_client import WHOLE, attach_frames, raw_bytes, rows_frames

pytestmark = pytest.mark.usefixtures("either_way")

CLIENT = b"c" * 16
SPEC = TableSpec("t", 100, 4, init=Init(Start.CONSTANT, 1.0), optimizer=ps.SGD(1.0))


class Direct:
    """Messages to a handler, and what it answers."""

    def __init__(self, max_bytes: int = 1 << 30, max_reply_bytes: int = 1 << 20) -> None:
        self.store = Store(max_bytes, max_reply_bytes)
        self.handler = Handler(self.store, None, SaveRoot(None))
        self.sequence = 0

    def head(self, kind: Kind) -> Head:
        self.sequence += 1
        return Head(kind, 5, CLIENT, self.sequence)

    def ask(self, frames: list[Any]) -> Message:
        answer = self.handler.answer([bytearray(frame) for frame in frames])
        assert not isinstance(answer, DeferredReply)
        found = unpack(answer)
        assert found.head.sequence == 0
        return found

    def attach(self, spec: TableSpec = SPEC, shard: Shard = WHOLE) -> Message:
        return self.ask(attach_frames(self.head(Kind.ATTACH), spec, shard))

    def push(self, ids: list[int], lr: float = 1.0, spec: TableSpec = SPEC) -> Message:
        grad = torch.ones(len(ids), spec.dim)
        return self.ask(rows_frames(self.head(Kind.PUSH), [(0, spec, ids, grad, lr)]))

    def lookup(self, ids: list[int], spec: TableSpec = SPEC) -> Message:
        head = Head(Kind.LOOKUP, 5, CLIENT)
        return self.ask(rows_frames(head, [(0, spec, ids, None, 0.0)]))

    def value(self, id: int) -> float:
        return float(np.frombuffer(self.lookup([id]).values, np.float32)[0])


@pytest.fixture
def direct() -> Direct:
    found = Direct()
    assert found.attach().control == {"table": 0}
    return found


def test_replies_repeat_who_asked(direct: Direct) -> None:
    for answer in (direct.lookup([1]), direct.push([1]), direct.push([1000])):
        assert (answer.head.request, answer.head.client) == (5, CLIENT)


@pytest.mark.parametrize(
    ("ids", "found"), [([1, 100], 100), ([-1], -1), ([3, 2**62], 2**62), ([2, -(2**63)], -(2**63))]
)
def test_ids_out_of_range(direct: Direct, ids: list[int], found: int) -> None:
    for answer in (direct.lookup(ids), direct.push(ids)):
        assert answer.control["code"] == "id"
        assert (answer.control["table"], answer.control["id"]) == ("t", found)
        assert f"row {found} of table 't', which has rows 0 to 99" in answer.control["text"]
    assert direct.store.tables[0].count == 0


@pytest.mark.parametrize("sharding", [Sharding.HASH, Sharding.RANGE])
def test_ids_of_another_server(sharding: Sharding) -> None:
    direct = Direct()
    direct.attach(shard=Shard(sharding, 0, 2))
    codes = [direct.lookup([id]).control.get("code") for id in range(100)]
    assert set(codes) == {None, "id"}
    stranger = codes.index("id")
    text = direct.push([stranger]).control["text"]
    assert f"row {stranger} of table 't' is not on this server" in text
    mine = codes.index(None)
    assert direct.push([mine]).head.kind is Kind.DONE
    assert direct.push([mine]).head.kind is Kind.DONE, "also when it has a slot"


def test_ids_twice(direct: Direct) -> None:
    assert direct.push([3, 9, 3]).control["id"] == 3
    assert direct.push([9, 3]).head.kind is Kind.DONE, "any order will do"
    assert direct.value(3) == 0.0


def test_a_message_is_checked_as_a_whole(direct: Direct) -> None:
    """The first table's push does not happen if the second one's is wrong."""
    direct.attach(TableSpec("u", 10, 4))
    ones = torch.ones(1, 4)
    parts: Any = [(0, SPEC, [1], ones, 1.0), (1, SPEC, [10], ones, 1.0)]
    answer = direct.ask(rows_frames(direct.head(Kind.PUSH), parts))
    assert (answer.control["code"], answer.control["table"]) == ("id", "u")
    assert direct.value(1) == 1.0


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), 1e39, 10_001.0])
def test_learning_rates(direct: Direct, lr: float) -> None:
    assert "learning rate" in direct.push([1], lr).control["text"]


def test_exactly_once(direct: Direct) -> None:
    frames = rows_frames(direct.head(Kind.PUSH), [(0, SPEC, [1], torch.ones(1, 4), 1.0)])
    for _ in range(3):
        assert direct.ask(frames).head.kind is Kind.DONE
    assert direct.value(1) == 0.0
    direct.sequence += 1
    assert direct.push([1]).control["code"] == "gap"
    assert direct.value(1) == 0.0


def test_a_refusal_counts_and_is_repeated(direct: Direct) -> None:
    frames = rows_frames(direct.head(Kind.PUSH), [(0, SPEC, [999], torch.ones(1, 4), 1.0)])
    first = direct.ask(frames).control
    assert direct.push([1]).head.kind is Kind.DONE, "the next number is no gap"
    assert direct.ask(frames).control == first


def test_attach_again(direct: Direct) -> None:
    assert direct.attach().control == {"table": 0}
    answer = direct.attach(TableSpec("t", 100, 8))
    assert answer.control["code"] == "table"
    assert "dim=4" in answer.control["text"]
    assert "dim=8" in answer.control["text"]


def test_memory_is_bounded() -> None:
    direct = Direct(max_bytes=300)
    direct.attach()
    assert direct.push([1, 2, 3]).head.kind is Kind.DONE
    answer = direct.push(list(range(20)))
    assert answer.control["code"] == "size"
    assert "--max-bytes is 300" in answer.control["text"]
    assert direct.push([1, 2, 3]).head.kind is Kind.DONE, "what is there still trains"
    assert direct.lookup(list(range(20))).head.kind is Kind.FOUND, "reading takes no memory"


def test_replies_are_bounded() -> None:
    direct = Direct(max_reply_bytes=16 * 10)
    direct.attach()
    assert direct.lookup(list(range(10))).head.kind is Kind.FOUND
    assert "--max-message-bytes" in direct.lookup(list(range(11))).control["text"]


def test_huge_tables_cost_nothing() -> None:
    """2**40 rows of 65,536 values: an address, and no memory before a row is pushed."""
    direct = Direct()
    spec = TableSpec("huge", 1 << 40, 1 << 8, init=Init(Start.CONSTANT, 0.0))
    direct.attach(spec)
    assert direct.push([(1 << 40) - 1, 0], spec=spec).head.kind is Kind.DONE
    assert direct.store.tables[0].count == 2
    assert np.frombuffer(direct.lookup([(1 << 40) - 1], spec).values, np.float32)[0] == -1.0


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ps.state.store.MOST_TABLES", 2)
    direct = Direct()
    codes = [direct.attach(TableSpec(f"t{n}", 1, 1)).control.get("code") for n in range(4)]
    assert codes == [None, None, "size", "size"]


def test_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was silent longest is forgotten; if it comes back, it is told of a gap."""
    monkeypatch.setattr("paceline.ps.state.clients.MOST_CLIENTS", 2)
    direct = Direct()
    for name in (b"a", b"b", b"a", b"c"):
        sequence = direct.store.clients.applied(name * 16) + 1
        direct.ask(attach_frames(Head(Kind.ATTACH, 1, name * 16, sequence), SPEC))
    assert [direct.store.clients.applied(name * 16) for name in (b"a", b"b", b"c")] == [2, 0, 1]
    answer = direct.ask(attach_frames(Head(Kind.ATTACH, 1, b"b" * 16, 2), SPEC))
    assert answer.control["code"] == "gap"


def test_a_fault_of_the_server_is_said(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("bits fell out")

    monkeypatch.setattr("paceline.ps.state.table.Table.push", broken)
    answer = direct.push([1])
    assert answer.control["code"] == "internal"
    assert "bits fell out" in answer.control["text"]
    monkeypatch.undo()
    assert direct.push([1]).head.kind is Kind.DONE
    assert "fault of the server" in caplog.text


@pytest.mark.parametrize("mode", [Mode.SUM, Mode.MEAN])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_bags_are_torchs(mode: Mode, padding_idx: int | None) -> None:
    """Pooled on the server, forward and backward, with empty bags and weights."""
    spec = TableSpec("b", 10, 4, optimizer=ps.SGD(0.5), padding_idx=padding_idx)
    direct = Direct()
    direct.attach(spec)
    ids, offsets = np.array([1, 2, 2, 7, 1]), np.array([0, 3, 3, 4])
    weights = torch.rand(5) if mode is Mode.SUM else None
    section = Section(0, Form.BAGS, Dtype.FLOAT32, 5, 4, mode, weights is not None, 0.5)
    integers = np.concatenate((ids, offsets)).tobytes()
    raw = b"" if weights is None else raw_bytes(weights) + bytes(4)
    start = bytearray(direct.lookup(list(range(10)), spec).values)
    weight = torch.frombuffer(start, dtype=torch.float32).view(10, 4).clone().requires_grad_()
    local = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids),
        weight,
        torch.from_numpy(offsets),
        mode=mode.name.lower(),
        per_sample_weights=weights,
        padding_idx=padding_idx,
    )
    found = direct.ask(pack_data(Head(Kind.LOOKUP, 1, CLIENT), [section], integers, raw))
    pooled = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(4, 4)
    assert torch.equal(pooled, local.detach())
    grad = torch.randn(4, 4)
    local.backward(grad)
    head = direct.head(Kind.PUSH)
    done = direct.ask(pack_data(head, [section], integers, raw + raw_bytes(grad)))
    assert done.head.kind is Kind.DONE
    assert weight.grad is not None
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-0.5)
    rows = direct.lookup(list(range(10)), spec)
    after = torch.frombuffer(bytearray(rows.values), dtype=torch.float32).view(10, 4)
    assert torch.equal(after, weight.detach())


@pytest.mark.parametrize("offsets", [[1, 2], [0, 4], [0, 2, 1], [0, -1], []])
def test_offsets_are_checked(direct: Direct, offsets: list[int]) -> None:
    section = Section(0, Form.BAGS, Dtype.FLOAT32, 3, len(offsets), Mode.SUM)
    integers = np.array([1, 2, 3, *offsets], np.int64).tobytes()
    answer = direct.ask(pack_data(Head(Kind.LOOKUP, 1, CLIENT), [section], integers, b""))
    assert "offsets" in answer.control["text"]


ids = st.one_of(st.integers(0, 12), st.integers(-(2**63), 2**63 - 1))


@st.composite
def data_messages(draw: st.DrawFn) -> tuple[Kind, list[Section], list[int], bytes]:
    shares, integers = [], []
    for _ in range(draw(st.integers(0, 3))):
        mode = draw(st.sampled_from(Mode))
        rows = draw(st.lists(ids, max_size=4))
        bags = [] if mode is Mode.NONE else draw(st.lists(st.integers(-1, 5), max_size=3))
        shares.append(
            Section(
                draw(st.integers(0, 2)),
                Form.ROWS if mode is Mode.NONE else Form.BAGS,
                draw(st.sampled_from(Dtype)),
                len(rows),
                len(bags),
                mode,
                draw(st.booleans()) if mode is Mode.SUM else False,
                draw(st.floats()),
            )
        )
        integers += [*rows, *bags]
    kind = draw(st.sampled_from([Kind.LOOKUP, Kind.PUSH, Kind.WRITE]))
    whole = st.integers(0, 20).map(lambda count: bytes(8 * count))
    values = draw(st.one_of(st.binary(max_size=80), whole))
    return kind, shares, integers, values


@settings(max_examples=examples(1000))
@given(data_messages())
def test_any_data_message_is_done_or_refused(
    message: tuple[Kind, list[Section], list[int], bytes],
) -> None:
    """And a push that is refused changes nothing."""
    kind, shares, integers, values = message
    direct = Direct()
    direct.attach(TableSpec("a", 10, 3))
    direct.attach(TableSpec("b", 12, 2, Dtype.FLOAT64, ps.Adam(), padding_idx=1, max_norm=1.0))
    head = Head(Kind.LOOKUP, 1, CLIENT) if kind is Kind.LOOKUP else direct.head(kind)
    answer = direct.ask(pack_data(head, shares, np.array(integers, np.int64).tobytes(), values))
    assert answer.head.kind in (Kind.DONE, Kind.FOUND, Kind.ERROR)
    assert answer.control.get("code") != "internal", answer.control
    if answer.head.kind is Kind.ERROR:
        assert [table.count for table in direct.store.tables] == [0, 0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(
    st.sampled_from([Kind.HELLO, Kind.ATTACH, Kind.STATS, Kind.SAVE, Kind.LOAD, Kind.WELCOME]),
    st.dictionaries(
        st.sampled_from(["nonce", "table", "shard", "path", "first"]), json_values, max_size=5
    ),
    st.sampled_from(sorted(SPEC.to_json())),
    json_values,
)
def test_any_control_message_is_done_or_refused(
    kind: Kind, control: dict[str, Any], key: str, value: Any
) -> None:
    direct = Direct()
    sequence = int(kind in (Kind.ATTACH, Kind.LOAD))
    if kind is Kind.ATTACH:  # nearly right
        shard = {"sharding": "hash", "index": 0, "count": 1}
        control = {"table": {**SPEC.to_json(), key: value}, "shard": shard} | control
    answer = direct.ask(pack_control(Head(kind, 1, CLIENT, sequence), control))
    assert answer.control.get("code") != "internal", answer.control
    assert answer.head.kind in (Kind.DONE, Kind.WELCOME, Kind.ERROR)
