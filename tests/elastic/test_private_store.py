"""The stores in which ranks of several hosts meet: as torch's, and closed to strangers."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.elastic.handshake import connect, store_key
from paceline.elastic.hosts.key_store import KeyStores, pack, unpack
from paceline.elastic.hosts.private_store import PrivateStore, private_store
from paceline.elastic.hosts.tunnel import StoreOrder, keep_store
from paceline.elastic.protocol import key_path, send, stores_path
from paceline.errors import MembershipError
from paceline.testing import run_ranks
from tests.attack.second_user import as_other_user
from tests.children import child_process

pytestmark = pytest.mark.usefixtures("warm_fork_server")
KEY = b"k" * 64


@dataclass(frozen=True)
class TwoHosts:
    """The private directories of two launchers, and the first one's store port."""

    first: Path
    second: Path
    store_port: int


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    paths = [tmp_path_factory.mktemp(f"host{number}") for number in range(2)]
    for path in paths:
        store_key(key_path(path), KEY)
    orders = [StoreOrder(number == 0, True, KEY, str(path)) for number, path in enumerate(paths)]
    with child_process(keep_store, orders[0]) as first, child_process(keep_store, orders[1]) as far:
        store_port = json.loads(first.pipe.recv_bytes())["store_port"]
        far.pipe.recv_bytes()
        far.pipe.send_bytes(json.dumps({"target": ["127.0.0.1", store_port]}).encode())
        yield TwoHosts(paths[0], paths[1], store_port)


@pytest.fixture
def stores(hosts: TwoHosts) -> Iterator[tuple[PrivateStore, PrivateStore]]:
    name = f"{os.urandom(4).hex()}-1"
    found = PrivateStore(hosts.first, name), PrivateStore(hosts.second, name)
    yield found
    for each in found:
        each.close()


def use(one: Any, other: Any) -> list[Any]:
    """Every operation, between two clients of one store."""
    one.set("a", "text")
    one.set("bytes", b"\x00\n\xff")
    found = [other.get("a"), other.get("bytes"), other.add("n", 3), one.add("n", -1)]
    found += [other.get("n"), one.check(["a", "n"]), one.check(["a", "b"])]
    found += [one.compare_set("a", "text", "new"), other.compare_set("a", "text", "newer")]
    found += [one.compare_set("free", "", "first"), one.compare_set("gone", "x", "y")]
    found += [one.check(["gone"]), other.delete_key("a"), one.delete_key("a"), one.check(["a"])]
    one.wait(["n", "bytes"], datetime.timedelta(seconds=60))
    with contextlib.suppress(dist.DistStoreError):
        other.wait(["never"], datetime.timedelta(seconds=0.01))
        found.append("it came")
    return found


def test_as_a_store_of_torch(stores: tuple[PrivateStore, PrivateStore]) -> None:
    theirs = dist.HashStore()
    assert use(*stores) == use(theirs, theirs)
    assert stores[0].num_keys() == 3


def test_who_waits_hears_of_it_and_keeps_nobody_else_waiting(
    stores: tuple[PrivateStore, PrivateStore],
) -> None:
    one, other = stores
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(one.get("late")))
    thread.start()
    one.set("meanwhile", "x")  # by the same client
    other.set("late", b"value")
    thread.join(60)
    assert found == [b"value"]


def train_together(hosts: TwoHosts, backend: str, name: str) -> list[float]:
    rank = int(os.environ["RANK"])
    store = private_store((hosts.first, hosts.second)[rank], name)
    dist.init_process_group(backend, store=dist.PrefixStore("p", store), rank=rank, world_size=2)
    del store
    total = torch.ones(1)
    dist.all_reduce(total)
    group = dist.new_group([0, 1])  # the store is used again
    dist.all_reduce(total, group=group)
    dist.monitored_barrier()
    dist.destroy_process_group()
    return total.tolist()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_group_is_made(hosts: TwoHosts, backend: str) -> None:
    found = run_ranks(2, train_together, hosts, backend, f"{backend}-1", init=False)
    assert found == [[4.0], [4.0]]


def test_old_stores_are_forgotten() -> None:
    stores = KeyStores()
    for number in range(20):
        stores.open(f"epoch-{number}").answer({"op": "set", "keys": ["a"]}, b"x")
    stores.open("attempt-0")
    assert stores.names() == ["epoch-17", "epoch-18", "epoch-19", "attempt-0"]
    with pytest.raises(MembershipError, match="is over"):
        stores.open("epoch-3")
    words, _ = unpack(stores.open("epoch-18").answer({"op": "check", "keys": ["a"]}, b""))
    assert words == {"is": True}


class TestStrangers:
    """Whatever they do, the store answers who knows the key, and has what it had."""

    @pytest.fixture(autouse=True)
    def unchanged(self, stores: tuple[PrivateStore, PrivateStore]) -> Iterator[None]:
        stores[0].set("a", "ours")
        yield
        assert (stores[1].get("a"), stores[1].num_keys()) == (b"ours", 1)

    @pytest.mark.parametrize("data", [b"\xff" * 64, pack({"op": "delete", "keys": ["a"]}), b""])
    def test_noise_at_the_port(self, hosts: TwoHosts, data: bytes) -> None:
        address = ("127.0.0.1", hosts.store_port)
        with contextlib.suppress(OSError), socket.create_connection(address) as loud:
            loud.sendall(data)  # until it has hung up
            loud.shutdown(socket.SHUT_WR)
            while loud.recv(1000):
                pass

    def test_a_wrong_key(self, hosts: TwoHosts) -> None:
        for address in (("127.0.0.1", hosts.store_port), stores_path(hosts.first)):
            with pytest.raises((EOFError, OSError)):
                connect(address, b"another key")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_another_user_of_the_host(self, hosts: TwoHosts) -> None:
        for directory in (hosts.first, hosts.second):
            found = as_other_user(_connect_to, stores_path(directory))
            assert found["error"] == "PermissionError"

    @pytest.mark.parametrize(
        "question", [b"no json", b'{"op": "set"}\n', b'{"op": "run", "keys": ["a"]}\n', b"[]\n"]
    )
    def test_a_question_that_makes_no_sense(
        self, hosts: TwoHosts, stores: tuple[PrivateStore, PrivateStore], question: bytes
    ) -> None:
        with connect(stores_path(hosts.second), KEY) as pipe:
            send(pipe, "keys", name=stores[0].name)
            pipe.send_bytes(question)
            with pytest.raises((EOFError, OSError)):
                pipe.recv_bytes()


def _connect_to(path: str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as plug:
        plug.connect(path)
    return {}
