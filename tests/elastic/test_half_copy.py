"""The source of a state dies in the middle of a copy; a message is lost in a cut connection."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.elastic.hosts.listening import sockets_of
from paceline.elastic.session import Session
from paceline.elastic.unblock import cut_connections, free_collectives
from paceline.errors import CollectiveError
from paceline.testing import run_ranks
from paceline.transport import messages
from tests.elastic.test_state import make


def own_store() -> Any:
    path = os.environ["PACELINE_TEST_INIT_METHOD"].removeprefix("file://")
    return dist.FileStore(path, 2)  # type: ignore[attr-defined]


def cut_off(pids: set[int]) -> None:
    """Cut the connections, and wait until gloo has closed them.

    A send that begins between the two is forgotten: [Note: what gloo forgets] in wait_guard.py.
    """

    def opened() -> set[str]:
        return {inode for _, inode in sockets_of("/proc/self/fd")}

    before = opened()
    cut = cut_connections(pids)
    assert cut
    while len(before - opened()) < cut:
        time.sleep(0.001)


class TestTheSourceDiesInTheMiddleOfACopy:
    """A survivor that is a step behind still holds its step; a joiner holds nothing."""

    @staticmethod
    def on_rank(has_trained: bool) -> tuple[bool, bool, bool]:
        rank, pids = dist.get_rank(), torch.tensor([os.getpid(), 0])
        others = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(others, pids)
        model, _, state = make()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(1 - rank)
        state.commit()
        if rank == 0:
            state.commit()
        if has_trained:
            state.has_entered()
        before = [t.clone() for t in model.state_dict().values()]
        broadcast = messages.GroupMessages.broadcast
        sent: list[str] = []

        store = own_store()

        def broadcast_some(*args: Any) -> None:
            sent.append(args[1])
            if sent.count("copy of the state") == 2:
                if rank == 0:
                    store.wait(["has the first half"])
                    cut_off({int(other[0]) for other in others} - {os.getpid()})
                else:
                    store.set("has the first half", "")
            broadcast(*args)

        messages.GroupMessages.broadcast = broadcast_some  # type: ignore[method-assign]
        session = Session(state)
        decision = {"rank": rank, "world": 2, "epoch": 1, "is_first": False, "step": 2,
                    "source": 0, "copies": True, "pids": []}  # fmt: skip
        session._rebuild = lambda *args: None  # type: ignore[method-assign]
        with pytest.raises((RuntimeError, ConnectionError)):
            session._enter(decision)
        state.put_back()
        after = model.state_dict().values()
        is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return sent.count("copy of the state") == 2, state.is_whole, is_same

    def test_a_survivor(self) -> None:
        ends = run_ranks(2, partial(self.on_rank, True))
        assert ends == [(True, True, True)] * 2

    def test_a_joiner(self) -> None:
        _, (is_half, is_whole, is_same) = run_ranks(2, partial(self.on_rank, False))
        assert (is_half, is_whole, is_same) == (True, False, False)


def send_to_the_end() -> str | None:
    group = dist.group.WORLD
    assert group is not None
    half = messages.GroupMessages(group)
    try:
        while True:
            half.broadcast("copy", torch.ones(16 << 20), 0)
    except CollectiveError as error:
        return error.operation


def lose_half_a_message() -> tuple[str | None, float]:
    rank, pids = dist.get_rank(), [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    peers = {int(pid) for pid in pids} - {os.getpid()}
    threading.Timer(0.2, free_collectives, ((), peers, ())).start()
    lost = send_to_the_end()
    dist.destroy_process_group()  # waits for what gloo has forgotten, unless that is kept
    store = own_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(total := torch.ones(1))
    return lost, float(total)


def test_a_message_that_gloo_has_half_sent_is_given_up() -> None:
    """Else the wait, and then the end of the group, take the time-out of the group: 50 s here."""
    ends = run_ranks(2, lose_half_a_message, timeout_s=50.0)
    assert ends == [("copy", 2.0)] * 2
