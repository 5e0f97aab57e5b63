"""Training through ``ps.EmbeddingBag`` while its servers are killed: exact sums at the end."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline import ps

ROWS, DIM, KILLS = 500, 4, 20


class Killer(threading.Thread):
    """Kills one server after the other, each incarnation once."""

    def __init__(self, directories: list[Path]) -> None:
        super().__init__()
        self._directories = directories
        self._stop_event = threading.Event()
        self.kills = 0

    def run(self) -> None:
        chance = random.Random(6)
        killed: set[int] = set()
        while self.kills < KILLS and not self._stop_event.wait(chance.uniform(0.02, 0.2)):
            lock = chance.choice(self._directories) / "lock"
            pid = int(lock.read_text() or 0)
            if pid and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                self.kills += 1

    def stop(self) -> None:
        self._stop_event.set()
        self.join()


@contextmanager
def killing(directories: list[Path]) -> Iterator[Killer]:
    killer = Killer(directories)
    killer.start()
    try:
        yield killer
    finally:
        killer.stop()


@pytest.mark.timeout(180)
def test_no_push_is_lost_and_none_applied_twice(
    start_servers: Callable[..., ps.LocalServers], tmp_path: Path
) -> None:
    """Each id of each batch adds exactly 1 to its row: SGD with lr 1 and a gradient of -1."""
    servers = start_servers(2, directory=tmp_path, restart=True, snapshot_every_s=0.15)
    chance = torch.Generator().manual_seed(0)
    counts = torch.zeros(ROWS)
    with ps.connect(servers, timeout_s=60) as connection:
        bag = ps.EmbeddingBag(
            ROWS,
            DIM,
            mode="sum",
            servers=connection,
            name="counts",
            optimizer=ps.SGD(1.0),
            init=ps.Init(ps.Start.CONSTANT, 0.0),
        )
        steps = 0
        with killing([tmp_path / "0", tmp_path / "1"]) as killer:
            while killer.is_alive() or steps < 100:
                ids = torch.randint(ROWS, (8, 5), generator=chance)
                found = bag(ids)
                assert torch.equal(found[:, 0].detach(), counts[ids].sum(1)), f"step {steps}"
                (-found.sum()).backward()
                counts += torch.bincount(ids.flatten(), minlength=ROWS)
                steps += 1
        assert killer.kills == KILLS
        connection.flush()
        rows = bag.rows(torch.arange(ROWS))
        assert torch.equal(rows, counts[:, None].expand(ROWS, DIM))
