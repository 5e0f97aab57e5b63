"""A rank's end of the conversation: what comes right after another message is not lost."""

from __future__ import annotations

from multiprocessing.connection import Pipe

import pytest

from paceline.elastic.client import CoordinatorClient
from paceline.elastic.protocol import receive, send

HANG_S = 60.0


@pytest.mark.parametrize("word", ["end", "regroup"])
def test_an_epoch_that_ends_before_the_rank_has_woken_up(word: str) -> None:
    ours, theirs = Pipe()
    client = CoordinatorClient(theirs, 0, committed=lambda: 0, free=lambda: None)
    assert receive(ours)["kind"] == "hello"
    send(ours, "begin", epoch=3)
    send(ours, word, why="a rank died", after=-1)
    send(ours, "ping")
    while receive(ours)["kind"] != "pong":  # then it has heard all of it
        pass
    assert client.wait_decision()["epoch"] == 3
    assert client.wait_over(HANG_S) if word == "end" else client.is_regrouping
    client.close()
    ours.close()
