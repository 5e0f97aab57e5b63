"""The server as a process, through its socket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import ps
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Kind
from paceline.ps.server.dispatch import Handler
from paceline.ps.server.loop import Server
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from tests.ps.raw_client import RawClient, attach_frames

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


def test_fsync_comes_before_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync for all that was waiting, and no acknowledgement before it."""
    settings = ServerSettings(f"ipc://{tmp_path}/s", tmp_path / "state", fsync=True)
    store = Store(1 << 20, 1 << 20)
    durable = Durable(tmp_path / "state", store, fsync=True)
    server = Server(settings, Handler(store, durable, SaveRoot(None)), durable)
    events: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda _: events.append("sync"))
    monkeypatch.setattr(server, "_send", lambda *_: events.append("answer"))
    with RawClient(settings.address) as client:
        for _ in range(3):
            client.socket.send_multipart(attach_frames(client.next_head(Kind.ATTACH), SPEC))
        until_s = time.monotonic() + 60
        while events.count("answer") < 3 and time.monotonic() < until_s:
            seen = len(events)
            server._serve_some()
            assert events[seen : seen + 1] in ([], ["sync"]), events
            assert events[seen:].count("sync") <= 1
    assert events.count("answer") == 3
    server.close()
    durable.close()
