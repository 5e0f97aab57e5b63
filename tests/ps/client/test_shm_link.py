"""Shared memory between a trainer and a server of one host: who gets it, what order, who dies."""

from __future__ import annotations

import os
import random
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline import ps
from paceline.native.extension import DISABLE_VARIABLE, native
from paceline.ps.client.batch import flat_bags
from paceline.ps.client.link import LinkEvent
from paceline.ps.client.shm_link import ShmLink, open_shm_link
from paceline.ps.protocol.shm_ring import CAPACITY, GREETING, MAGIC, shm_listener_path
from paceline.ps.server import shm_listener as listener
from paceline.ps.server.descriptors import raise_descriptor_limit
from paceline.testing import run_ranks

pytestmark = pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")

Start = Callable[..., ps.LocalServers]
SHARED = "shared memory"
ROWS, DIM = 40_000, 64


def make(servers: ps.Servers, name: str = "t") -> ps.EmbeddingBag:
    return ps.EmbeddingBag(
        ROWS,
        DIM,
        mode="sum",
        servers=servers,
        name=name,
        optimizer=ps.SGD(1.0),
        init=ps.Init(ps.Start.CONSTANT, 0.0),
        pooling="trainer",
    )


def pid_of(servers: ps.Servers) -> int:
    return int(servers.stats()[0]["pid"])


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wait_for(is_met: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_met():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def one(fork_server: None) -> Iterator[ps.LocalServers]:
    with ps.local(1, start_method="forkserver") as servers:
        yield servers


def test_on_one_host_memory_is_shared(one: ps.LocalServers) -> None:
    with ps.connect(one) as servers:
        assert servers.routes == [SHARED]
        sent = servers.channels[0]._link._socket
        module = make(servers)
        before = servers.channels[0].sent_bytes
        module(torch.tensor([[1, 2, 3]])).sum().backward()
        servers.flush()
        assert servers.channels[0].sent_bytes > before
        assert not sent.getsockopt(15) & 1  # ZMQ_EVENTS, POLLIN: nothing came this way
        assert module.rows(torch.tensor([1, 2, 3])).unique().tolist() == [-1.0]


def test_it_can_be_switched_off(one: ps.LocalServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    with ps.connect(one) as servers:
        assert servers.routes == ["ipc"]
        assert make(servers, "off")(torch.tensor([[1]])).sum().item() == 0.0


def test_a_smaller_limit_of_messages_holds(start_servers: Start) -> None:
    with ps.connect(start_servers(1, max_message_bytes=CAPACITY // 2 - 1)) as servers:
        assert servers.routes == ["ipc"]
    with ps.connect(start_servers(1, max_message_bytes=CAPACITY // 2)) as servers:
        assert servers.routes == [SHARED]


def test_small_and_large_messages_keep_one_order(one: ps.LocalServers) -> None:
    """Sizes on both sides of what fits, requests and replies: every lookup sees all pushes."""
    chance = random.Random(3)
    expected = torch.zeros(ROWS)
    with ps.connect(one) as servers:
        module = make(servers, "order")
        for _ in range(60):
            count = chance.choice([1, 5, 100, 1500, 2200, 9000])
            ids = torch.randperm(ROWS)[:count]
            found = module(ids[None])
            assert found[0, 0].item() == expected[ids].sum().item()
            found.sum().backward()
            expected[ids] -= 1
            if chance.random() < 0.1:
                servers.stats()
        assert servers.routes == [SHARED]
        assert torch.equal(module.rows(torch.arange(ROWS))[:, 0], expected)


def test_many_replies_that_nobody_reads(one: ps.LocalServers) -> None:
    """More than the ring takes: the rest comes another way, or is asked for again."""
    with ps.connect(one) as servers:
        module = make(servers, "unread")
        ids = torch.arange(400)[None]
        replies = [module._tables.plan({0: flat_bags(module.config, ids)}) for _ in range(40)]
        for exchange in replies:
            exchange.ask(0)
        assert 40 * 400 * DIM * 4 > 2 * CAPACITY
        for exchange in replies:
            (found,) = exchange.collect()
            assert found.shape == (1, DIM)


def test_many_pushes_before_any_answer(one: ps.LocalServers) -> None:
    """More requests than fit while the server is stopped; each counts once."""
    with ps.connect(one) as servers:
        module = make(servers, "burst")
        outputs = [module(torch.arange(50)[None]) for _ in range(300)]
        pid = pid_of(servers)
        os.kill(pid, 19)  # SIGSTOP
        try:
            for output in outputs:
                output.sum().backward()
        finally:
            os.kill(pid, 18)  # SIGCONT
        servers.flush()
        assert module.rows(torch.arange(50)).unique().tolist() == [-300.0]


def test_a_killed_server_is_noticed_and_the_next_one_shares_again(
    start_servers: Start, tmp_path: Path
) -> None:
    local = start_servers(1, directory=tmp_path)
    with ps.connect(local) as servers:
        module = make(servers)
        for step in range(6):
            module(torch.arange(30)[None]).sum().backward()
            local.kill(0)
            local.restart(0)
            assert module.rows(torch.arange(30)).unique().tolist() == [-(step + 1.0)]
        servers.flush()
        module(torch.arange(30)[None])
        assert servers.routes == [SHARED]


def test_another_server_at_the_same_place_is_noticed(one: ps.LocalServers) -> None:
    """It may have come back empty: nothing is believed before it has said what it has."""
    with ps.connect(one) as servers:
        link = servers.channels[0]._link
        link._leave_shm()
        link.use_shm("another one")
        assert servers.routes == ["ipc"]
        assert link.take_event() is LinkEvent.BROKEN
        assert link.take_event() is LinkEvent.NOTHING
        link.use_shm(servers.channels[0]._ledger.incarnation)
        assert servers.routes == [SHARED]


def test_nothing_is_left_when_a_trainer_leaves(one: ps.LocalServers) -> None:
    with ps.connect(one) as watcher:
        pid, mine = pid_of(watcher), descriptors_of(os.getpid())
        theirs = descriptors_of(pid)
        for _ in range(5):
            with ps.connect(one) as servers:
                make(servers, "left")(torch.tensor([[1]])).sum().backward()
                assert descriptors_of(pid) > theirs
        wait_for(lambda: descriptors_of(pid) <= theirs)
        assert descriptors_of(os.getpid()) <= mine


def push_and_die(address: str) -> None:
    servers = ps.connect([address])
    make(servers, "orphan")(torch.arange(20)[None]).sum().backward()
    os.kill(os.getpid(), 9)


def test_a_killed_trainer_leaves_nothing_and_its_push_counts(one: ps.LocalServers) -> None:
    with ps.connect(one) as servers:
        module = make(servers, "orphan")
        pid = pid_of(servers)
        before = descriptors_of(pid)
        with pytest.raises(Exception, match="SIGKILL"):
            run_ranks(1, push_and_die, one.addresses[0], init=False)
        wait_for(lambda: descriptors_of(pid) <= before)
        assert module.rows(torch.arange(20)).unique().tolist() == [-1.0]


def greeting(address: str, words: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(os.fspath(shm_listener_path(address)))  # type: ignore[arg-type]
    connection.sendall(words)
    return connection


def test_the_door_is_private_and_takes_no_garbage(one: ps.LocalServers) -> None:
    address = one.addresses[0]
    path = shm_listener_path(address)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    silent = [greeting(address, b"") for _ in range(20)]
    for words in (b"x", b"GET / HTTP/1.0\r\n\r\n", GREETING.pack(b"PLring0\0", bytes(16))):
        with greeting(address, words) as connection:
            assert connection.recv(100) == b""
    with ps.connect(one) as servers:
        assert servers.routes == [SHARED]
        taken = servers.channels[0]._link._client
        with greeting(address, GREETING.pack(MAGIC, taken)) as connection:
            assert connection.recv(100) == b""  # somebody else's id opens nothing
        assert make(servers, "garbage")(torch.tensor([[1]])).sum().item() == 0.0
    for each in silent:
        each.close()


def test_who_says_nothing_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 1.0)
    made = listener.ShmListener(tmp_path / "s.listener", "0" * 16, raise_descriptor_limit())
    try:
        address = f"ipc://{tmp_path}/s"
        silent = greeting(address, b"")
        made.look()
        time.sleep(1.1)
        with greeting(address, b"") as connection:
            made.look()
            assert silent.recv(1) == b""
            connection.settimeout(0.05)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        silent.close()
    finally:
        made.close()
    assert shm_listener_path("tcp://127.0.0.1:1") is None
    assert shm_listener_path("ipc://@name") is None


def test_garbage_in_the_ring_is_refused_and_hurts_nobody_else(one: ps.LocalServers) -> None:
    chance = random.Random(5)
    with ps.connect(one) as servers:
        pid = pid_of(servers)
        before = descriptors_of(pid)
        for _ in range(20):
            garbage = open_shm_link(one.addresses[0], os.urandom(16))
            assert isinstance(garbage, ShmLink)
            for _ in range(100):
                sizes = [chance.randrange(200) for _ in range(chance.randrange(1, 4))]
                garbage.send([os.urandom(size) for size in sizes])
            garbage.receive(1000)
            garbage.close()
        assert make(servers, "hurt")(torch.tensor([[1]])).sum().item() == 0.0
        wait_for(lambda: descriptors_of(pid) <= before)
        assert servers.stats()[0]["refused"] >= 2000


def test_a_torn_ring_ends_the_connection(one: ps.LocalServers) -> None:
    """The server lets go of the memory, and the trainer goes on without a lost push."""
    with ps.connect(one) as servers:
        module = make(servers, "torn")
        module(torch.arange(10)[None]).sum().backward()
        shm = servers.channels[0]._link._shm
        assert shm is not None
        servers.flush()
        tear(shm)
        wait_for(lambda: has_ended(shm))
        for _ in range(3):
            module(torch.arange(10)[None]).sum().backward()
        assert module.rows(torch.arange(10)).unique().tolist() == [-4.0]
        assert servers.routes == [SHARED]
        assert servers.channels[0]._link._shm is not shm


def has_ended(shm: ShmLink) -> bool:
    return bool(select.select([shm._connection], [], [], 0)[0])


def tear(shm: ShmLink) -> None:
    """Say that more is written than there is, as a trainer with a fault might do."""
    with open("/proc/self/maps") as maps:
        line = [each for each in maps if "memfd:paceline-ps" in each][-1]
    start = int(line.split("-")[0], 16)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start + 64)  # the count of what is written
        memory.write((1 << 40).to_bytes(8, "little"))
    os.eventfd_write(shm._events[0], 1)
