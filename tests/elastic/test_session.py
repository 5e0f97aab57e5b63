"""A rank between two epochs: how long it waits for the others to connect."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline.elastic import session
from paceline.elastic.session import Session


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """The time-outs of groups that are made from now on; each attempt fails."""
    found: list[timedelta] = []
    clock_s = [100.0]

    def fail(*_: Any, timeout: timedelta, **__: Any) -> None:
        found.append(timeout)
        if len(found) in LATE:
            clock_s[0] += timeout.total_seconds()
        raise RuntimeError("a rank has died, or is late")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(session, "restart_group_names", lambda: None)
    monkeypatch.setattr(session, "CONNECT_S", 3.0)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    return found


LATE = (3, 4)


def test_only_an_attempt_that_was_too_short_makes_the_next_one_longer(
    limits: list[timedelta],
) -> None:
    rank = Session.__new__(Session)
    rank._backend, rank._failures = "gloo", 0
    rank.client = SimpleNamespace(is_over=False)  # type: ignore[assignment]
    for _ in range(5):
        with pytest.raises(ConnectionError, match="could not be made: a rank has died"):
            rank._connect(None, 0, 2)
    assert [limit.total_seconds() for limit in limits] == [3.0, 3.0, 3.0, 12.0, 48.0]
