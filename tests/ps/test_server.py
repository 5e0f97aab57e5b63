"""The server as a process, through its socket."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline import ps
from paceline.ps.spec import TableSpec
from paceline.ps.wire import Kind
from tests.ps.raw_client import RawClient

SPEC = TableSpec("t", 100, 4, optimizer=ps.SGD(0.5))


def test_lookup_push_lookup(start_servers: Callable[..., ps.LocalServers]) -> None:
    servers = start_servers(1)
    with RawClient(servers.addresses[0]) as client:
        assert client.hello()["applied"] == 0
        assert client.attach(SPEC).control == {"table": 0}
        before = client.lookup(0, SPEC, [3, 7])
        grad = torch.randn(2, 4)
        assert client.push(0, SPEC, [3, 7], grad, 0.5).head.kind is Kind.DONE
        after = client.lookup(0, SPEC, [3, 7])
        assert torch.equal(after, before.add(grad, alpha=-0.5))
        assert client.hello()["applied"] == 2
        stats = client.stats()
        assert stats["tables"][0]["rows"] == 2
