"""A trainer's forked child: it can do nothing with the connection, keeps nothing of it open, and
what it drops stays the parent's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from paceline import ps
from paceline.errors import ServersClosedError
from paceline.launch.child import Child
from paceline.ps.protocol.shm_ring import is_possible
from tests.children import begin_in_fork, do_in_fork, wait_for

Start = Callable[..., ps.LocalServers]
IDS = torch.tensor([[1, 2, 3]])

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs the native core: a C compiler")


def make(servers: ps.Servers) -> ps.EmbeddingBag:
    return ps.EmbeddingBag(
        10,
        8,
        mode="sum",
        servers=servers,
        name="t",
        optimizer=ps.SGD(1.0),
        init=ps.Init(ps.Start.CONSTANT, 0.0),
        pooling="trainer",
    )


def ring_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:paceline-ps")


def event_descriptors() -> int:
    names = os.listdir("/proc/self/fd")
    found = [f"/proc/self/fd/{name}" for name in names]
    return sum("eventfd" in os.readlink(path) for path in found if os.path.lexists(path))


def test_a_child_has_nothing_of_the_rings(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers)
        module(IDS).sum().backward()
        servers.flush()
        shm = servers.channels[0]._link._shm
        assert shm is not None
        listener, before = shm._listener, event_descriptors()
        assert ring_mappings() == 1

        def look() -> None:
            assert ring_mappings() == 0
            assert event_descriptors() == before - 2
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(listener)

        assert do_in_fork(look) == 0
        assert ring_mappings() == 1
        assert module(IDS).unique().tolist() == [-3.0]


def test_what_a_child_drops_or_ends_stays_the_parents(start_servers: Start) -> None:
    servers = ps.connect(start_servers(2))
    module = make(servers)
    output = module(IDS).sum()

    def drop() -> None:
        with pytest.raises(ServersClosedError, match="forked child"):
            module(IDS + 1)
        with pytest.raises(ServersClosedError, match="forked child"):
            output.backward()
        with pytest.raises(ServersClosedError, match="forked child"):
            servers.stats()
        servers.close(flush=False)
        module.__dict__.clear()
        servers.__dict__.clear()
        gc.collect()

    assert do_in_fork(drop) == 0
    output.backward()
    assert module.rows(IDS[0]).unique().tolist() == [-1.0]
    servers.close()


def test_locks_that_other_threads_hold_do_not_stop_a_child(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers)
        is_held, is_over = threading.Event(), threading.Event()

        def hold() -> None:
            with servers.channels[0]._lock, module._tables._lock:
                is_held.set()
                is_over.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        is_held.wait()

        def use() -> None:
            with pytest.raises(ServersClosedError, match="forked child"):
                module(IDS)
            servers.channels[0].close()

        try:
            assert do_in_fork(use) == 0
        finally:
            is_over.set()
            thread.join()


def test_servers_end_in_order_while_a_child_lives(start_servers: Start) -> None:
    """The child does not keep the supervisor's pipe open, nor can it give orders."""
    local = start_servers(1)
    here, there = os.pipe()

    def stay() -> None:
        with pytest.raises(ServersClosedError, match="belong to process"):
            local.kill(0)
        local.close()
        os.close(there)
        os.read(here, 1)  # until the parent has ended its servers

    child = begin_in_fork(stay)
    try:
        with ps.connect(local) as servers:
            assert make(servers)(IDS).shape == (1, 8)
        with mock.patch.object(Child, "kill") as kill:
            local.close()
        assert not kill.called
    finally:
        os.close(there)
        os.close(here)
        assert wait_for(child) == 0
