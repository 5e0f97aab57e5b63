"""Whoever waits long over a process group says so on the log."""

from __future__ import annotations

import logging
import re
import threading
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from paceline.liveness import wait_log, watch_of
from paceline.testing import run_ranks

LONG_S = 60.0


class Lines(logging.Handler):
    """What was logged, and that there was something."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.came.set()


def wait_for_rank_1() -> list[str]:
    """Rank 1 comes when rank 0 has logged that it waits."""
    group, lines = dist.group.WORLD, Lines()
    logging.getLogger("paceline").addHandler(lines)
    watch = watch_of(group)
    watch.meet(lambda value: _gather(value))
    store = dist.distributed_c10d._get_default_store()

    def tell() -> None:
        lines.came.wait(LONG_S)
        store.set("rank 0 has said it", "")

    with mock.patch.object(wait_log, "LOG_AFTER_S", 0.3):
        if dist.get_rank() == 0:
            threading.Thread(target=tell, daemon=True).start()
        else:
            store.wait(["rank 0 has said it"], timedelta(seconds=LONG_S))
        watch.run("sum of losses", lambda: group.allreduce([torch.ones(1)]))
    return lines.texts


def _gather(value: object) -> list[object]:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def test_a_long_wait_is_on_the_log() -> None:
    waiting, _ = run_ranks(2, wait_for_rank_1, backend="gloo")
    assert waiting
    assert re.match(r"Rank 0 has waited for \d+ s in sum of losses", waiting[0])
    assert "for one of rank 1 (pid " in waiting[0]
    assert "None of them is known to have died" in waiting[0]


def no_wait() -> list[str]:
    lines = Lines()
    logging.getLogger("paceline").addHandler(lines)
    group = dist.group.WORLD
    for _ in range(20):
        watch_of(group).run("sum", lambda: group.allreduce([torch.ones(1)]))
    return lines.texts


def test_a_short_one_is_not() -> None:
    assert run_ranks(2, no_wait, backend="gloo") == [[], []]
