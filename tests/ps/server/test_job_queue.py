"""Work for forked children, one at a time; and what happens when there is no child to be had."""

from __future__ import annotations

import errno
import os

import pytest
import zmq

from paceline.ps.server.forked_job import ForkedJob
from paceline.ps.server.job_queue import Jobs


def test_no_further_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked is told, the server goes on, and the next job is tried."""

    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    heard: list[str] = []

    def end(job: ForkedJob) -> None:
        try:
            heard.append(str(job.finish()))
        except OSError as error:
            heard.append(str(error))

    poller = zmq.Poller()
    jobs = Jobs(poller)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", no_fork)
        assert jobs.add(lambda: 1, end)
        assert not jobs.is_busy
    assert "temporarily unavailable" in heard[0]
    assert jobs.add(lambda: 2, end)
    while jobs.is_busy:
        jobs.tend(dict(poller.poll(60_000)))
    assert heard[1:] == ["2"]
