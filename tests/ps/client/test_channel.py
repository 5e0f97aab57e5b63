"""A trainer whose server dies, is slow, or says no: waits, goes on, or an error that names it."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import ps
from paceline.errors import ServerLostError, ServerRefusedError, ServersClosedError

Start = Callable[..., ps.LocalServers]


def make(servers: ps.Servers, pooling: str = "auto") -> ps.EmbeddingBag:
    return ps.EmbeddingBag(
        100,
        8,
        mode="sum",
        servers=servers,
        name="t",
        optimizer=ps.SGD(1.0),
        init=ps.Init(ps.Start.CONSTANT, 0.0),
        pooling=pooling,
    )


IDS = torch.arange(100)[None]


def test_training_goes_on_after_a_kill(start_servers: Start, tmp_path: Path) -> None:
    """Every push counts once: rows are exact sums."""
    local = start_servers(2, directory=tmp_path)
    with ps.connect(local) as servers:
        module = make(servers)
        for step in range(12):
            output = module(IDS)
            assert output.sum().item() == -step * 100 * 8
            output.sum().backward()
            if step % 4 == 1:
                local.kill(step % 2)  # the push may be lost, or half of its answer
                local.restart(step % 2)
        assert module.rows(IDS).unique().tolist() == [-12.0]


def test_a_trainer_waits_for_a_server_that_comes_back_later(
    start_servers: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = start_servers(1, directory=tmp_path)
    with ps.connect(local, timeout_s=60) as servers:
        servers.channels[0]._limits = servers.channels[0]._limits.__class__(warn_s=0.3)
        module = make(servers)
        local.kill(0)
        module_output: list[float] = []
        trainer = threading.Thread(target=lambda: module_output.append(module(IDS).sum().item()))
        with caplog.at_level(logging.WARNING, "paceline.ps"):
            trainer.start()
            until_s = time.monotonic() + 60
            while not caplog.records and time.monotonic() < until_s:
                time.sleep(0.01)
            local.restart(0)
            trainer.join(60)
        assert module_output == [0.0]
        waiting = [
            each.message for each in caplog.records if "waiting for server 0" in each.message
        ]
        assert len(waiting) == 1
        assert local.addresses[0] in waiting[0]


def test_a_server_without_its_state_is_lost(start_servers: Start) -> None:
    local = start_servers(1)
    servers = ps.connect(local)
    module = make(servers)
    module(IDS).sum().backward()
    servers.flush()
    local.kill(0)
    local.restart(0)
    with pytest.raises(ServerLostError, match="without its state") as caught:
        module(IDS)
    assert (caught.value.server, caught.value.address) == (0, local.addresses[0])
    assert caught.value.operation == "lookup of 1 tables"
    servers.close()


def test_somebody_else_made_new_tables_on_a_server_that_came_back_empty(
    start_servers: Start,
) -> None:
    local = start_servers(1)
    servers = ps.connect(local)
    module = make(servers)
    module(IDS)
    local.kill(0)
    local.restart(0)
    with ps.connect(local) as others:
        make(others)
        with pytest.raises(ServerLostError, match="without its state"):
            module(IDS)
    servers.close(flush=False)


def test_the_deadline_is_an_error_that_names_the_server(start_servers: Start) -> None:
    local = start_servers(2)
    with ps.connect(local) as servers:
        module = make(servers)
        local.kill(1)
        servers.channels[1]._limits = type(servers.channels[1]._limits)(timeout_s=0.5)
        with pytest.raises(ServerLostError, match=r"no answer from server 1 .* within 0.5 s"):
            module(IDS)


def test_nobody_there(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'nobody.sock'}"
    with pytest.raises(ServerLostError, match="is there a server at this address"):
        ps.connect([address], timeout_s=0.3)


def test_refusals_name_the_table(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        make(servers)
        with pytest.raises(ServerRefusedError, match="'t'") as caught:
            ps.EmbeddingBag(7, 8, servers=servers, name="t")
        assert caught.value.table == "t"
        assert caught.value.code == "table"


def test_closed_and_forked(start_servers: Start) -> None:
    local = start_servers(1)
    servers = ps.connect(local)
    module = make(servers)
    child = os.fork()
    if child == 0:
        try:
            module(IDS)
        except ServersClosedError as error:
            os._exit(7 if "forked child" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert module(IDS).shape == (1, 8)  # the parent goes on
    servers.close()
    with pytest.raises(ServersClosedError, match="closed"):
        module(IDS)


def test_backward_on_another_thread(start_servers: Start) -> None:
    with ps.connect(start_servers(1)) as servers:
        module = make(servers)
        for _ in range(5):
            outputs = [module(IDS) for _ in range(3)]
            threads = [threading.Thread(target=output.sum().backward) for output in outputs]
            for thread in threads:
                thread.start()
            module.rows(IDS)
            for thread in threads:
                thread.join()
        assert module.rows(IDS).unique().tolist() == [-15.0]


def test_unacknowledged_pushes_are_bounded(start_servers: Start, tmp_path: Path) -> None:
    local = start_servers(1, directory=tmp_path)
    with ps.connect(local) as servers:
        channel = servers.channels[0]
        kind = type(channel._limits)
        module = make(servers, pooling="trainer")
        outputs = [module(IDS) for _ in range(10)]
        local.kill(0)
        channel._limits = kind(kept_bytes=10_000, timeout_s=0.3)
        loss = torch.cat(outputs).sum()
        with pytest.raises(ServerLostError, match="push"):
            loss.backward()
        assert channel._ledger.kept_bytes < 20_000
        local.restart(0)
        channel._limits = kind()
        servers.flush()


def test_a_module_owns_the_connection_it_made(start_servers: Start) -> None:
    local = start_servers(1)
    module = ps.Embedding(10, 4, servers=local, name="own")
    module.close()
    with pytest.raises(ServersClosedError):
        module(torch.tensor([1]))
    forgotten = ps.Embedding(10, 4, servers=local.addresses, name="own")
    del forgotten
    gc.collect()  # conftest sees if a descriptor was left


def test_stats_save_and_load(start_servers: Start, tmp_path: Path) -> None:
    with ps.connect(start_servers(2)) as servers:
        module = make(servers)
        module(IDS).sum().backward()
        assert servers.save(tmp_path / "saved")
        module(IDS).sum().backward()
        module.prefetch(IDS)
        servers.load(tmp_path / "saved")
        assert module(IDS).sum().item() == -800.0
        tables = [table for each in servers.stats() for table in each["tables"]]
        assert [table["name"] for table in tables] == ["t", "t"]
        assert sum(table["rows"] for table in tables) == 100
