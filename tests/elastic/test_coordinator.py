"""The coordinator's sockets: private, and closed to whoever does not know the key."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic.coordinator import Coordinator, CoordinatorOrder
from paceline.elastic.handshake import connect, read_key
from paceline.elastic.hosts import keeper as keeper_module
from paceline.elastic.hosts.agent import Agent, AgentPlan
from paceline.elastic.hosts.keeper import CoordinatorKeeper
from paceline.elastic.hosts.takeover import HostReport
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.protocol import key_path, receive, send, socket_path
from paceline.errors import MembershipError
from paceline.launch.fork_server import shared_fork_server
from tests.system import free_port

KEY = b"k" * 64
DEADLINE_S = 60.0


class Running:
    """A coordinator in a thread, at a port."""

    def __init__(
        self, tmp_path: Path, port: int | None = None, lease_s: float = 30.0, **policy: Any
    ) -> None:
        self.address = ("127.0.0.1", port or free_port())
        found = ElasticPolicy(0, **({"hosts": 2, "max_hosts": 2} | policy))
        order = CoordinatorOrder(found, KEY, str(tmp_path / "path"), self.address, lease_s, 4)
        self.coordinator = Coordinator(order)
        self.thread = threading.Thread(target=self.coordinator.run)
        self.thread.start()

    def close(self) -> None:
        made = self.coordinator
        made._mailbox.post(lambda: setattr(made, "_is_over", True))
        self.thread.join()
        made.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


def say_hello(pipe: Connection, host: int = 0, launcher: str = "a", **facts: Any) -> dict[str, Any]:
    hello = {"host": host, "hosts": 2, "ranks": 1, "launcher": launcher, "coordinator": "",
             "heard": 0, "store_port": 0, "report": HostReport().to_plain()}  # fmt: skip
    send(pipe, "host", **(hello | facts))
    return receive(pipe)


def hear(pipe: Connection, kind: str) -> dict[str, Any]:
    while True:
        message = receive(pipe)
        if message["kind"] == kind:
            return message


def test_who_knows_the_key_and_makes_no_sense_is_refused(running: Running) -> None:
    with connect(running.address, KEY) as pipe:
        assert say_hello(pipe, host=7)["kind"] == "refused"
    with connect(running.address, KEY) as pipe:
        assert "disagree about --nnodes" in say_hello(pipe, hosts=3)["why"]
    with connect(running.address, KEY) as pipe:
        send(pipe, "dance")
        assert receive(pipe)["kind"] == "refused"


def test_a_launcher_that_is_started_again_while_its_old_connection_is_there(
    running: Running,
) -> None:
    """A host that loses its power does not hang up; one that goes on to talk is a second one."""
    with connect(running.address, KEY) as one:
        assert say_hello(one, 1)["kind"] == "welcome"
        for _ in range(2):
            with connect(running.address, KEY) as other:
                answer = say_hello(other, 1, launcher="b")
            assert (answer["kind"], answer["is_final"]) == ("refused", False)
            assert "its lease from before is not over" in answer["why"]
        send(one, "alive", beat=1)
        assert hear(one, "granted")["beat"] == 1
        with connect(running.address, KEY) as other:
            answer = say_hello(other, 1, launcher="b")
        assert answer["is_final"]
        assert "two hosts have --node-rank 1" in answer["why"]


def test_what_was_not_heard_is_said_again(running: Running) -> None:
    with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
        welcome = say_hello(one, 0, "a")
        say_hello(other, 1, "b")
        fork = hear(one, "fork")
    with connect(running.address, KEY) as again:
        back = say_hello(again, 0, "a", coordinator=welcome["coordinator"], heard=0)
        assert back["is_known"]
        assert hear(again, "fork") == fork


def test_what_is_sent_twice_is_heard_once(running: Running) -> None:
    with connect(running.address, KEY) as one, connect(running.address, KEY) as other:
        say_hello(one, 0, "a")
        say_hello(other, 1, "b")
        for _ in range(2):
            send(one, "scale", ask=1, ranks=9, n=1)
        send(one, "scale", ask=2, ranks=9, n=2)
        assert hear(one, "answer")["ask"] == 1
        assert hear(one, "answer")["ask"] == 2


def test_the_first_host_may_stand_still_and_others_may_not(tmp_path: Path) -> None:
    running = Running(tmp_path, lease_s=0.5)
    hosts = running.coordinator._hosts
    try:
        with connect(str(tmp_path / "path"), KEY) as one, connect(running.address, KEY) as other:
            say_hello(one, 0, "a")
            say_hello(other, 1, "b")
            until_s = time.monotonic() + DEADLINE_S
            while 1 in hosts:  # it was heard later than the first
                assert time.monotonic() < until_s
                time.sleep(0.01)
            assert 0 in hosts
            send(one, "alive", beat=7)
            assert hear(one, "granted")["beat"] == 7
    finally:
        running.close()


def leave_at_once(pipe: Connection, order: CoordinatorOrder) -> int:
    return 0


def test_a_coordinator_that_leaves_before_the_job_is_over_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "run_coordinator", leave_at_once)
    order = CoordinatorOrder(ElasticPolicy(2), KEY, str(tmp_path / "path"))
    lines: list[str] = []
    refused: list[str] = []
    is_over: list[bool] = []
    with selectors.DefaultSelector() as selector:
        server, over = shared_fork_server(), lambda: bool(is_over)
        keeper = CoordinatorKeeper(server, order, selector, lines.append, refused.append, over)
        until_s = time.monotonic() + DEADLINE_S
        while keeper.pid or keeper.until_next_s() is not None:
            assert time.monotonic() < until_s
            for key, _ in selector.select(0.05):
                if selector.get_map().get(key.fd) == key:
                    key.data()
            if len(lines) == 2:
                is_over.append(True)
            keeper.tick()
        keeper.close()
    assert lines == ["the coordinator has exited with code 0; it is started again"] * 2
    assert not refused


class NoLauncher:
    """Starts nothing."""

    def __init__(self) -> None:
        self.forked: list[int] = []
        self.epochs: list[int] = []
        self.killed: dict[int, str] = {}
        self.store_port = 0

    def fork(self, order: dict[str, Any]) -> None:
        self.forked.append(order["member"])

    def kill(self, member: int, why: str) -> None:
        self.killed[member] = why

    kill_stuck = kill

    def pid_of(self, member: int) -> int:
        return 0

    def on_epoch(self, event: dict[str, Any]) -> None:
        self.epochs.append(event["epoch"])

    def on_store(self, store_port: int) -> None:
        self.store_port = store_port

    def listens(self) -> list[str]:
        return []


class RunningAgent:
    """An agent in this thread."""

    def __init__(self, address: tuple[str, int], **plan: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.launcher = NoLauncher()
        found = {"host": 0, "hosts": 1, "ranks": 2, "lease_s": 30.0, "key": KEY} | plan
        self.agent = Agent(AgentPlan(address=address, **found), self.launcher, self.selector)

    def run_until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < until_s
            for key, _ in self.selector.select(0.05):
                if self.selector.get_map().get(key.fd) == key:
                    key.data()
            self.agent.tick()

    def close(self) -> None:
        self.agent.close()
        self.selector.close()


def test_a_new_coordinator_hears_all_and_a_refusal_is_worth_a_lease(tmp_path: Path) -> None:
    first = Running(tmp_path, hosts=1, max_hosts=1)
    mine = RunningAgent(first.address)
    agent, launcher, lease = mine.agent, mine.launcher, mine.agent._link.lease
    try:
        mine.run_until(lambda: len(launcher.forked) == 2 and lease.until_s is not None)
        assert lease.until_s is not None
        members = list(agent.members)
        first.close()
        agent.say("scale", ask=7, ranks=99)  # said to nobody, and not part of a report
        mine.run_until(lambda: not agent.is_welcome)
        before_s = lease.until_s
        mine.run_until(lambda: bool(lease.until_s and lease.until_s > before_s))
        second = Running(tmp_path, first.address[1], hosts=1, max_hosts=1)
        try:
            mine.run_until(lambda: agent.is_welcome)
            mine.run_until(lambda: second.coordinator._membership.is_started)
            assert sorted(second.coordinator._membership.members) == sorted(members)
            assert len(launcher.forked) == 2
            assert not launcher.killed
            mine.run_until(
                lambda: agent.has_said_all() and second.coordinator._hosts[0].messages.heard > 0
            )
        finally:
            second.close()
    finally:
        mine.close()


def test_who_is_to_be_killed_and_does_not_live_has_ended() -> None:
    mine = RunningAgent(("127.0.0.1", free_port()))
    said: list[dict[str, Any]] = []
    mine.agent._link.say = lambda kind, **facts: said.append({"kind": kind, **facts})  # type: ignore[method-assign]
    try:
        fork = {"kind": "fork", "member": 4, "slot": 1, "is_first": False, "world": 1, "hosts": [0]}
        mine.agent.on_order(fork)
        for member in (9, 4):  # unknown; known, and its process has not begun
            mine.agent.on_order({"kind": "kill", "member": member, "why": "it did not answer"})
        assert [(each["kind"], each["member"]) for each in said] == [("exited", 9), ("exited", 4)]
        assert "was not started: it did not answer" in said[1]["why"]
        assert not mine.agent.members
        assert not mine.launcher.killed
    finally:
        mine.close()


def test_an_epoch_that_two_coordinators_tell_is_shown_once() -> None:
    mine = RunningAgent(("127.0.0.1", free_port()))
    try:
        for epoch in (0, 0, 2, 1, 2, 3):
            mine.agent.on_order({"kind": "epoch", "event": {"epoch": epoch}})
        assert mine.launcher.epochs == [0, 2, 3]
    finally:
        mine.close()


def test_the_agents_socket(tmp_path: Path) -> None:
    mine = RunningAgent(("127.0.0.1", free_port()))
    directory = mine.agent.directory
    try:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert key_path(directory).stat().st_mode & 0o777 == 0o600
        with pytest.raises((EOFError, OSError, MembershipError)):
            connect(socket_path(directory), b"a wrong key")
        answers: list[Any] = []

        def ask(message: dict[str, Any]) -> None:
            with connect(socket_path(directory), read_key(key_path(directory))) as pipe:
                send(pipe, **message)
                try:
                    answers.append(receive(pipe))
                except (EOFError, ConnectionResetError):
                    answers.append(None)

        for message in ({"kind": "dance"}, {"kind": "hello", "member": 99, "pid": 1}):
            thread = threading.Thread(target=ask, args=(message,))
            thread.start()
            mine.run_until(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]
        assert "unknown message" in answers[0]["error"]
        assert answers[1] is None
    finally:
        mine.close()
    assert not directory.exists()
