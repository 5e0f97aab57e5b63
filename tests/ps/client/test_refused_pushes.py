"""A push that a server refuses: the trainer's next call says so, whatever was lost on the way."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import ps
from paceline.errors import PushRefusedError, ServerRefusedError
from paceline.ps.client.ledger import OpenRequest
from paceline.ps.protocol.wire import Head, Kind, pack_control, read_head
from tests.examples import examples
from tests.ps.client.test_ledger import CLIENT, Model, breaks
from tests.ps.server.test_listener import DEADLINE_S, until

Start = Callable[..., ps.LocalServers]

ROUTES: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "ipc": {"max_message_bytes": 1 << 18},
    "journal": {"directory": True},
}


@pytest.fixture(params=ROUTES)
def local(request: pytest.FixtureRequest, start_servers: Start, tmp_path: Path) -> ps.LocalServers:
    """One server with room for a hundred rows, more or less."""
    options = dict(ROUTES[request.param])
    if options.pop("directory", False):
        options["directory"] = tmp_path / "state"
    return start_servers(1, max_bytes=100 * (16 * 4 + 8) + 4096, **options)


def make(servers: Any, rows: int = 10_000) -> ps.Embedding:
    return ps.Embedding(
        rows,
        16,
        servers=servers,
        name="words",
        optimizer=ps.SGD(1.0),
        init=ps.Init(ps.Start.CONSTANT, 0.0),
    )


def push(module: ps.Embedding, first: int, count: int) -> None:
    module(torch.arange(first, first + count)).sum().backward()


CALLS: dict[str, Callable[[ps.Servers, ps.Embedding, Path], Any]] = {
    "lookup": lambda servers, module, path: module(torch.arange(3)),
    "rows": lambda servers, module, path: module.rows(torch.arange(3)),
    "write": lambda servers, module, path: module.write(torch.arange(1), torch.zeros(1, 16)),
    "flush": lambda servers, module, path: servers.flush(),
    "module.flush": lambda servers, module, path: module.flush(),
    "close": lambda servers, module, path: servers.close(),
    "save": lambda servers, module, path: servers.save(path),
    "load": lambda servers, module, path: servers.load(path),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_raises(call: str, local: ps.LocalServers, tmp_path: Path) -> None:
    servers = ps.connect(local)
    try:
        module = make(servers)
        push(module, 0, 10)
        push(module, 5000, 4000)  # does not fit
        with pytest.raises(PushRefusedError, match="--max-bytes") as caught:
            CALLS[call](servers, module, tmp_path / "saved")
    finally:
        servers.close(flush=False)
    error = caught.value
    assert (error.pushes, error.rows, error.table, error.server) == (1, 4000, "words", 0)
    assert error.code == "size"
    assert "ids 5000, 5001, 5002" in str(error)
    assert error.address == local.addresses[0]


def test_each_is_told_once_and_the_others_count(local: ps.LocalServers) -> None:
    """A call that raises has pushed nothing; of all others it is known what became of them."""
    sent = {10: 0, 4000: 0}
    told = 0
    with ps.connect(local) as servers:
        module = make(servers)
        for first, count in [(0, 10), (0, 10), (1000, 4000), (1000, 4000), (0, 10)] * 6:
            try:
                push(module, first, count)
                sent[count] += 1
            except PushRefusedError as error:
                told += error.pushes
        try:
            servers.flush()
        except PushRefusedError as error:
            told += error.pushes
        servers.flush()
        assert told == sent[4000] > 5
        assert module.rows(torch.arange(1))[0, 0] == -sent[10]
        assert torch.equal(module.rows(torch.arange(1000, 1010)), torch.zeros(10, 16))


def test_a_learning_rate_that_is_none(local: ps.LocalServers) -> None:
    with ps.connect(local) as servers:
        module = make(servers)
        push(module, 0, 10)
        module.lr = float("nan")
        push(module, 0, 10)
        with pytest.raises(PushRefusedError, match="learning rate of nan") as caught:
            push(module, 0, 10)
        assert caught.value.code == "wire"
        module.lr = 1.0
        push(module, 0, 10)
        assert module.rows(torch.arange(1))[0, 0] == -2


def again_and_again(call: Callable[[], None]) -> None:
    """Until the answer to an earlier push is here."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        call()


def test_prefetch_and_pushes_without_lookups(local: ps.LocalServers) -> None:
    with ps.connect(local) as servers:
        module = make(servers)
        output = module(torch.arange(4000)).sum()
        with pytest.raises(PushRefusedError, match="before this push, which was not sent"):
            again_and_again(lambda: output.backward(retain_graph=True))
        with contextlib.suppress(PushRefusedError):
            servers.flush()
        output.backward()
        with pytest.raises(PushRefusedError, match="before this prefetch"):
            again_and_again(lambda: module.prefetch(torch.arange(3)))
        assert torch.equal(module.rows(torch.arange(4000)), torch.zeros(4000, 16))


def test_several_servers_are_named_in_one_error(start_servers: Start) -> None:
    local = start_servers(2, max_bytes=8192)
    with ps.connect(local) as servers:
        module = make(servers)
        push(module, 0, 4000)
        with pytest.raises(PushRefusedError) as caught:
            servers.flush()
    assert caught.value.pushes == 2
    assert caught.value.rows == 4000
    for address in local.addresses:
        assert address in str(caught.value)


def test_a_server_that_is_killed_before_its_answer_is_heard(
    start_servers: Start, tmp_path: Path
) -> None:
    """The journal has the refusal, and WELCOME tells of it."""
    local = start_servers(1, directory=tmp_path, max_bytes=8192)
    with ps.connect(local) as servers, ps.connect(local) as other:
        module = make(servers)
        push(module, 0, 10)
        servers.flush()
        for _ in range(3):
            push(module, 0, 4000)
            until(lambda: other.stats()[0]["refused"] > 0)
            local.kill(0)
            local.restart(0)
            with pytest.raises(PushRefusedError) as caught:
                servers.flush()
            assert caught.value.pushes == 1
        servers.flush()


def test_more_than_the_server_takes_in_a_message(start_servers: Start) -> None:
    """It would hang up, again and again, until the deadline."""
    local = start_servers(1, max_message_bytes=1 << 16)
    with ps.connect(local) as servers:
        module = make(servers)
        with pytest.raises(ServerRefusedError, match="--max-message-bytes"):
            module(torch.arange(10_000))
        push(module, 0, 10)
        servers.flush()


SCRIPT = """
import torch
from paceline import ps
def main():
    global local
    local = ps.local(1, max_bytes=8192)
    servers = ps.connect(local)
    module = ps.Embedding(10_000, 16, servers=servers, name="words")
    module(torch.arange(4000)).sum().backward()
    print("the end", flush=True)
    {end}
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "end", ["", pytest.param("global kept; kept = servers", marks=pytest.mark.slow)]
)
def test_a_program_that_ends_without_a_flush(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{end}", end))
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout == "the end\n"
    assert "refused 1 of this trainer's pushes (4000 rows of 'words'" in found.stderr


def train_and_fail(local: ps.LocalServers) -> None:
    with ps.connect(local) as servers:
        push(make(servers), 0, 4000)
        raise ZeroDivisionError


def test_an_error_on_the_way_out_does_not_hide_it(
    start_servers: Start, caplog: pytest.LogCaptureFixture
) -> None:
    local = start_servers(1, max_bytes=8192)
    with caplog.at_level(logging.WARNING, "paceline.ps"), pytest.raises(ZeroDivisionError):
        train_and_fail(local)
    assert "refused 1 of this trainer's pushes" in caplog.text


REMEMBERED = 2


class Refusing(Model):
    """Refuses what is called bad, and remembers only the last few."""

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}
        self.sequence = 0
        super().__init__()

    def serve(self) -> None:
        if not self.way_out:
            return
        head, rest = read_head(self.way_out[0][0])
        if head.kind is not Kind.PUSH:
            super().serve()
            self._complete(head)
            return
        self.way_out.popleft()
        text = json.loads(bytes(rest))["text"]
        if head.sequence > self.sequence + 1:
            answer = {"code": "gap", "text": "gap"}
        else:
            if head.sequence == self.sequence + 1:
                self.sequence += 1
                self.applied.append(text)
                if "bad" in text:
                    self.refused[head.sequence] = text
            answer = {}
            if head.sequence in list(self.refused)[-REMEMBERED:]:
                answer = {"code": "size", "text": self.refused[head.sequence]}
        kind = Kind.ERROR if answer else Kind.DONE
        self.way_back.append(pack_control(Head(kind, head.request, CLIENT), answer))

    def _complete(self, head: Head) -> None:
        if head.kind is Kind.HELLO:
            control = json.loads(bytes(read_head(self.way_back.pop()[0])[1]))
            control["refused"] = len(self.refused)
            last = list(self.refused.items())[-REMEMBERED:]
            control["refusals"] = [[n, {"code": "size", "text": text}] for n, text in last]
            reply = pack_control(Head(Kind.WELCOME, head.request, CLIENT), control)
            self.way_back.append(reply)


actions = st.lists(
    st.sampled_from(["push", "bad", "bad", "lookup", "serve", "serve", "receive", "hello"])
    | breaks,
    max_size=60,
)


@settings(max_examples=examples(600))
@given(actions)
def test_every_refusal_is_told_once(steps: list[str | tuple[int, int, bool]]) -> None:
    """Whatever is lost: after a last HELLO, as many were told as were refused."""
    model = Refusing()
    posted: list[OpenRequest] = []
    told = 0
    for step in steps:
        if step in ("push", "bad"):
            posted.append(model.post(Kind.PUSH, f"{step} {len(posted)}"))
        elif step == "lookup":
            model.post(Kind.STATS)
        elif step == "serve":
            model.serve()
        elif step == "receive":
            model.receive()
        elif step == "hello":
            model.way_out.append(model.ledger.hello())
        else:
            assert not isinstance(step, str)
            model.break_connection(*step)
        refused = model.ledger.take_refused()
        told += 0 if refused is None else refused.pushes
    model.exchange_all()
    refused = model.ledger.take_refused()
    told += 0 if refused is None else refused.pushes
    assert len(model.applied) == len(posted)
    assert told == len(model.refused) == sum("bad" in each.what for each in posted)
