"""A rank's end of the conversation: what comes right after another message is not lost."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.elastic import session
from paceline.elastic.client import CoordinatorClient
from paceline.elastic.handshake import KEY_BYTES, admit, store_key
from paceline.elastic.keyed_listener import listen_at
from paceline.elastic.protocol import DIRECTORY, MEMBER, key_path, receive, send, socket_path
from paceline.elastic.session import Session
from paceline.errors import MembershipError

HANG_S = 60.0


class Paused(threading.Event):
    """Whoever frees a rank stands still after it has looked, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_looked, self.may_go_on = threading.Event(), threading.Event()

    def is_set(self) -> bool:
        found = super().is_set()
        if threading.current_thread().name == "paceline-free" and not found:
            self.has_looked.set()
            self.may_go_on.wait(HANG_S)
        return found


def test_nothing_is_freed_once_the_rank_has_left() -> None:
    happened: list[str] = []
    ours, theirs = Pipe()
    client = CoordinatorClient(theirs, 0, committed=lambda: 0, free=lambda: happened.append("free"))
    client._left = left = Paused()
    assert receive(ours)["kind"] == "hello"
    send(ours, "end", why="a rank died", after=-1)
    assert left.has_looked.wait(HANG_S)

    def leave() -> None:
        client.ready(3, True)
        happened.append("next epoch")

    rank = threading.Thread(target=leave)
    rank.start()
    if not ours.poll(0.3):  # it waits for the one that frees; too short a time hides a mistake
        left.may_go_on.set()
    assert receive(ours)["kind"] == "ready"
    send(ours, "begin", epoch=1)
    rank.join(HANG_S)
    left.may_go_on.set()
    client.close()
    assert happened[-1] == "next epoch"
    ours.close()


def test_a_message_that_makes_no_sense_is_the_last() -> None:
    ours, theirs = Pipe()
    client = CoordinatorClient(theirs, 0, committed=lambda: 0, free=lambda: None)
    send(ours, "end", why="without a step")
    with pytest.raises(MembershipError, match="the launcher is gone"):
        client.wait_decision()
    client.close()
    ours.close()


@pytest.mark.parametrize("word", ["end", "regroup"])
def test_an_epoch_that_ends_before_the_rank_has_woken_up(word: str) -> None:
    ours, theirs = Pipe()
    client = CoordinatorClient(theirs, 0, committed=lambda: 0, free=lambda: None)
    assert receive(ours)["kind"] == "hello"
    send(ours, "begin", epoch=3)
    send(ours, word, why="a rank died", after=-1)
    send(ours, "ping")
    while receive(ours)["kind"] != "pong":  # then it has heard all of it
        pass
    assert client.wait_decision()["epoch"] == 3
    assert client.wait_over(HANG_S) if word == "end" else client.is_regrouping
    client.close()
    ours.close()


class TestLauncher:
    """What a rank makes of a launcher that does not answer."""

    @pytest.fixture
    def directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(DIRECTORY, str(tmp_path))
        monkeypatch.setenv(MEMBER, "0")
        store_key(key_path(tmp_path), b"k" * KEY_BYTES)
        return tmp_path

    def connect(self) -> CoordinatorClient | None:
        return CoordinatorClient.from_environment(lambda: 0, lambda: None)

    def test_it_is_waited_for(self, directory: Path) -> None:
        """It is so busy that it hangs up once."""
        clients: list[CoordinatorClient | None] = []
        with listen_at(socket_path(directory)) as listener:
            rank = threading.Thread(target=lambda: clients.append(self.connect()))
            rank.start()
            listener.accept()[0].close()
            with Connection(listener.accept()[0].detach()) as pipe:
                admit(pipe, b"k" * KEY_BYTES)
                assert receive(pipe) == {"kind": "hello", "member": 0, "pid": os.getpid()}
                rank.join(HANG_S)
        assert clients[0] is not None
        clients[0].close()

    def test_it_has_ended(self, directory: Path) -> None:
        listen_at(socket_path(directory)).close()
        with pytest.raises(MembershipError, match="the launcher is gone"):
            self.connect()

    def test_its_directory_is_removed(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(DIRECTORY, str(directory / "gone"))
        with pytest.raises(MembershipError, match="the launcher is gone"):
            self.connect()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """The time-outs of groups that are made from now on; each attempt fails."""
    found: list[timedelta] = []
    clock_s = [100.0]

    def fail(*_: Any, timeout: timedelta, **__: Any) -> None:
        found.append(timeout)
        if len(found) in LATE:
            clock_s[0] += timeout.total_seconds()
        raise RuntimeError("a rank has died, or is late")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(session, "restart_group_names", lambda: None)
    monkeypatch.setattr(session, "CONNECT_S", 3.0)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    return found


LATE = (3, 4)


def test_only_an_attempt_that_was_too_short_makes_the_next_one_longer(
    limits: list[timedelta],
) -> None:
    rank = Session.__new__(Session)
    rank._backend, rank._failures = "gloo", 0
    rank.client = SimpleNamespace(is_over=False)  # type: ignore[assignment]
    for _ in range(5):
        with pytest.raises(ConnectionError, match="could not be made: a rank has died"):
            rank._connect(None, 0, 2)
    assert [limit.total_seconds() for limit in limits] == [3.0, 3.0, 3.0, 12.0, 48.0]
