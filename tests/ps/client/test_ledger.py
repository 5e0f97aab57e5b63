"""The client's half of the protocol against a server and a network that a test controls."""

from __future__ import annotations

import json
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ps.client.ledger import Ledger, LedgerState, OpenRequest
from paceline.ps.protocol.wire import SEQUENCED, Frame, Head, Kind, pack_control, read_head
from tests.examples import examples

CLIENT = bytes(range(16))


class Model:
    """A server that keeps what it applied, and a network that can break.

    What is written to a broken connection is lost, what was not yet written follows over the next
    one: so a break loses some of the oldest messages and some of the newest replies.
    """

    def __init__(self) -> None:
        self.ledger = Ledger(CLIENT)
        self.applied: list[str] = []
        self.incarnation = 0
        self.way_out: deque[list[Frame]] = deque()
        self.way_back: deque[list[Frame]] = deque()
        self.way_out.append(self.ledger.hello())

    def post(self, kind: Kind, text: str = "") -> OpenRequest:
        pending = OpenRequest(kind, text, json.dumps({"text": text}).encode())
        self.way_out.append(self.ledger.enter(pending))
        return pending

    def serve(self) -> None:
        if not self.way_out:
            return
        head, rest = read_head(self.way_out.popleft()[0])
        control = json.loads(bytes(rest))
        reply = Kind.DONE
        answer: dict[str, object] = {"applied": list(self.applied)}
        if head.kind is Kind.HELLO:
            reply = Kind.WELCOME
            answer = {"nonce": control["nonce"], "applied": len(self.applied)}
            answer["incarnation"] = str(self.incarnation)
        elif head.kind in SEQUENCED and head.sequence == len(self.applied) + 1:
            self.applied.append(control["text"])
        elif head.kind in SEQUENCED and head.sequence > len(self.applied):
            reply, answer = Kind.ERROR, {"code": "gap", "text": "gap"}
        self.way_back.append(pack_control(Head(reply, head.request, CLIENT), answer))

    def receive(self) -> None:
        if self.way_back:
            self.way_out.extend(self.ledger.take(self.way_back.popleft()))

    def break_connection(self, lost_out: int, kept_back: int, is_noticed: bool) -> None:
        for _ in range(min(lost_out, len(self.way_out))):
            self.way_out.popleft()
        while len(self.way_back) > kept_back:
            self.way_back.pop()
        if is_noticed and self.ledger.state is not LedgerState.MEETING:
            self.ledger.doubt()
            self.way_out.append(self.ledger.hello())

    def exchange_all(self) -> None:
        """As a channel that waits: once nothing comes any more, HELLO."""
        for _ in range(20):
            while self.way_out or self.way_back:
                self.serve()
                self.receive()
            if not self.ledger.has_open(sequenced=False):
                return
            self.way_out.append(self.ledger.hello())
        raise AssertionError("still waiting")


breaks = st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans())
actions = st.lists(
    st.sampled_from(["push", "lookup", "serve", "serve", "receive", "hello"]) | breaks, max_size=60
)


@settings(max_examples=examples(600))
@given(actions)
def test_every_push_once_and_every_lookup_sees_the_pushes_before_it(
    steps: list[str | tuple[int, int, bool]],
) -> None:
    model = Model()
    pushed: list[str] = []
    lookups: list[tuple[OpenRequest, int]] = []
    for step in steps:
        if step == "push":
            pushed.append(f"push {len(pushed)}")
            model.post(Kind.PUSH, pushed[-1])
        elif step == "lookup":
            lookups.append((model.post(Kind.STATS), len(pushed)))
        elif step == "serve":
            model.serve()
        elif step == "receive":
            model.receive()
        elif step == "hello":
            model.way_out.append(model.ledger.hello())
        else:
            assert not isinstance(step, str)
            model.break_connection(*step)
    model.exchange_all()
    assert model.applied == pushed
    assert model.ledger.acknowledged == len(pushed)
    assert model.ledger.kept_bytes == 0
    for pending, before in lookups:
        assert pending.is_done
        assert pending.reply is not None
        seen = json.loads(bytes(read_head(pending.reply[0])[1]))["applied"]
        assert seen[:before] == pushed[:before]


def opened() -> Model:
    model = Model()
    model.exchange_all()
    model.serve()
    model.receive()
    assert model.ledger.state is LedgerState.OPEN
    return model


def test_a_lookup_that_overtook_a_lost_push_is_not_believed() -> None:
    model = opened()
    model.post(Kind.PUSH, "a")
    lookup = model.post(Kind.STATS)
    model.way_out.popleft()  # the push
    model.serve()
    model.receive()
    assert not lookup.is_done
    assert model.ledger.state is LedgerState.DOUBTING
    model.exchange_all()
    assert lookup.reply is not None
    assert model.applied == ["a"]


def test_a_server_without_its_state_is_lost() -> None:
    model = opened()
    model.post(Kind.PUSH, "a")
    model.exchange_all()
    model.applied.clear()
    model.incarnation += 1
    model.break_connection(0, 0, True)
    model.serve()
    model.receive()
    assert model.ledger.state is LedgerState.LOST


def test_an_abandoned_lookup_is_dropped_and_not_sent_again() -> None:
    model = opened()
    lookup = model.post(Kind.STATS)
    model.ledger.abandon(lookup)
    model.break_connection(1, 0, True)
    model.serve()
    model.receive()
    assert not model.way_out
    assert not model.ledger.has_open(sequenced=False)


def test_save_may_be_answered_late() -> None:
    model = opened()
    save = model.post(Kind.SAVE)
    lookup = model.post(Kind.STATS)
    late = model.way_out.popleft()
    model.serve()
    model.receive()
    assert lookup.is_done
    assert model.ledger.state is LedgerState.OPEN
    model.way_out.append(late)
    model.serve()
    model.receive()
    assert save.is_done


def test_the_server_may_complain_about_a_message_it_cannot_read() -> None:
    model = Model()
    head = Head(Kind.ERROR, 0, bytes(16))
    model.ledger.take(pack_control(head, {"code": "wire", "text": "version 7"}))
    assert model.ledger.complaint == "version 7"
