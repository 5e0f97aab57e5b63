"""Strangers at the sockets of an elastic job: they change nothing, and take nothing up."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.elastic import keyed_listener
from paceline.elastic.handshake import admit, connect, read_key
from paceline.elastic.keyed_listener import MAX_HEARD, KeyedListener, listen_at
from paceline.errors import ConfigurationError
from tests.elastic.test_coordinator import (
    DEADLINE_S,
    KEY,
    Running,
    RunningAgent,
    hear,
    say_hello,
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


class TestStrangers:
    """Whatever they do at the port, two launchers meet, and the job begins."""

    def meet(self, running: Running) -> None:
        with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
            assert say_hello(one, 0, "a")["kind"] == "welcome"
            assert say_hello(other, 1, "b")["kind"] == "welcome"
            assert hear(one, "fork")["slot"] == 0
            assert hear(other, "fork")["slot"] == 1

    def test_wrong_key(self, running: Running) -> None:
        with pytest.raises((EOFError, OSError)):
            connect(running.address, b"a wrong key")
        self.meet(running)

    @pytest.mark.parametrize(
        "data",
        [
            b"\xff" * 64,
            b"\x00\x00\x00\x40",
            b"\x7f\xff\xff\xff" + b"x" * 100_000,
            b"GET / HTTP/1.1",
        ],
        ids=["garbage", "half", "too large", "http"],
    )
    def test_noise(self, running: Running, data: bytes) -> None:
        with socket.create_connection(running.address) as loud:
            loud.sendall(data)
            self.meet(running)

    def test_silent_and_many(self, running: Running) -> None:
        silent = [socket.create_connection(running.address) for _ in range(2 * MAX_HEARD)]
        try:
            self.meet(running)
            assert len(running.coordinator._listeners[1]._heard) <= MAX_HEARD
        finally:
            for each in silent:
                each.close()

    def test_slow(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """One byte after the other: the time for a newcomer is for all of them."""
        monkeypatch.setattr(keyed_listener, "HEAR_S", 0.3)
        monkeypatch.setattr(keyed_listener, "_LOOK_S", 0.05)
        sent, words = 0, (64).to_bytes(4, "big") + bytes(64)
        with socket.create_connection(running.address) as slow:
            assert slow.recv(4 + 32)
            slow.settimeout(0.1)
            while sent < len(words):
                try:
                    slow.sendall(words[sent : sent + 1])
                    sent += 1
                    if not slow.recv(1):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
        assert sent < len(words)

    def test_no_descriptor_is_left(self) -> None:
        """The listener does not take a processor for itself meanwhile."""
        listener = _Exhausted()
        made = KeyedListener(listener, KEY, lambda hello, pipe: None)  # type: ignore[arg-type]
        assert listener.has_failed.wait(DEADLINE_S)
        tries = listener.tries
        time.sleep(0.3)
        assert listener.tries - tries < 100
        made.close()

    def test_who_repeats_what_it_heard(self, running: Running) -> None:
        """The proof of one connection is worth nothing in another, nor is the other end's."""
        with socket.create_connection(running.address) as first:
            challenge = first.recv(4 + 32)
            first.sendall((64).to_bytes(4, "big") + challenge[4:] + challenge[4:])
            assert first.recv(100) == b""
        self.meet(running)


class _Exhausted:
    """A socket that listens, in a process without descriptors."""

    def __init__(self) -> None:
        self.tries = 0
        self.has_failed = threading.Event()

    def accept(self) -> None:
        self.tries += 1
        self.has_failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    def settimeout(self, seconds: float | None) -> None:
        pass

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_host_that_is_gone_without_a_word_is_noticed() -> None:
    """Both ends of a connection between hosts have the kernel look whether the other is there."""
    with listen_at(("127.0.0.1", 0)) as listener:
        found: list[Connection] = []
        thread = threading.Thread(
            target=lambda: found.append(connect(listener.getsockname(), KEY)), daemon=True
        )
        thread.start()
        near, _ = listener.accept()
        with Connection(near.detach()) as pipe:
            admit(pipe, KEY)
            thread.join(DEADLINE_S)
            for end in (pipe, found[0]):
                with socket.socket(fileno=os.dup(end.fileno())) as same:
                    assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000
            found[0].close()


def test_a_stranger_takes_the_port_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """Where there was a coordinator before, whoever does not know the key is as good as nobody."""
    first = Running(tmp_path, hosts=1, max_hosts=1)
    mine = RunningAgent(first.address)
    agent, lease = mine.agent, mine.agent._link.lease
    try:
        mine.run_until(lambda: len(mine.launcher.forked) == 2 and lease.until_s is not None)
        first.close()
        mine.run_until(lambda: not agent.is_welcome)
        met: list[str] = []
        with listen_at(first.address) as listener:
            listener.settimeout(0.05)

            def has_met_two() -> bool:
                with contextlib.suppress(TimeoutError):
                    _pretend(listener.accept()[0])
                    met.append("a launcher")
                return len(met) > 1

            mine.run_until(has_met_two)
            until_s = lease.until_s
        mine.run_until(lambda: lease.until_s != until_s)  # nobody is there: that is a refusal
        assert agent.outcome is None
        second = Running(tmp_path, first.address[1], hosts=1, max_hosts=1)
        try:
            mine.run_until(lambda: agent.is_welcome)
        finally:
            second.close()
    finally:
        mine.close()


def _pretend(plug: socket.socket) -> None:
    """Answer a launcher without knowing the key."""
    with Connection(plug.detach()) as pipe, contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(bytes(32))
        pipe.recv_bytes()
        pipe.send_bytes(bytes(32))


def test_where_a_stranger_listens_from_the_beginning_the_job_ends_with_a_message() -> None:
    with listen_at(("127.0.0.1", 0)) as listener:
        mine = RunningAgent(listener.getsockname())
        try:
            thread = threading.Thread(target=lambda: _pretend(listener.accept()[0]))
            thread.start()
            mine.run_until(lambda: mine.agent.outcome is not None)
            assert mine.agent.outcome == "what listens there does not know the job's key"
            thread.join()
        finally:
            mine.close()


class TestKeyFile:
    def test_others_can_read_it(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        path.write_bytes(KEY)
        path.chmod(0o644)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            read_key(path)
        path.chmod(0o600)
        assert read_key(path) == KEY

    def test_it_is_too_short_or_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "key"
        with pytest.raises(ConfigurationError, match="No such file"):
            read_key(path)
        path.write_bytes(b"secret")
        path.chmod(0o600)
        with pytest.raises(ConfigurationError, match="too short") as caught:
            read_key(path)
        assert "secret" not in str(caught.value)
