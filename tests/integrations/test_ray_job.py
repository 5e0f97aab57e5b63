"""Who trains in an elastic job of Ray's, without Ray: its workers are processes of these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.elastic.handshake import connect, read_key
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.protocol import DIRECTORY, MEMBER, key_path, receive, send, socket_path
from paceline.errors import MembershipError
from paceline.integrations.ray_job import Place, RayJob
from tests.integrations import ray_replicas

ROOT = Path(__file__).parents[2]
DEADLINE_S = 250
WAITS = [sys.executable, "-S", "-c", "input()"]


class Workers:
    """Processes in the place of Ray's workers, each with a connection as its session has it."""

    def __init__(self, job: RayJob) -> None:
        self.job = job
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []

    def start(self, slot: int) -> tuple[subprocess.Popen[bytes], Place]:
        """As Ray's controller does."""
        process = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process, self.job.take(slot, process.pid)

    def join(self, place: Place) -> Connection:
        """As ``elastic.run`` does."""
        directory = Path(place.environ[DIRECTORY])
        pipe = connect(socket_path(directory), read_key(key_path(directory)))
        self.pipes.append(pipe)
        send(pipe, "hello", member=int(place.environ[MEMBER]), pid=0)
        send(pipe, "joined")
        return pipe

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def workers() -> Iterator[Workers]:
    job = RayJob(ElasticPolicy(2))
    with contextlib.closing(job), contextlib.closing(Workers(job)) as workers:
        yield workers


def test_a_dead_worker_ends_the_epoch_and_its_slot_takes_another(workers: Workers) -> None:
    process, place = workers.start(0)
    _, other = workers.start(1)
    pipes = [workers.join(place), workers.join(other)]
    begins = [receive(pipe) for pipe in pipes]
    assert [(b["kind"], b["rank"], b["world"]) for b in begins] == [("begin", n, 2) for n in (0, 1)]
    assert all(begin["copies"] and not begin["is_first"] for begin in begins)
    assert place.meeting != other.meeting

    process.kill()
    end = receive(pipes[1])
    assert (end["kind"], end["why"]) == ("end", f"rank 0 (pid {process.pid}) ended")
    send(pipes[1], "ready", step=3, is_clean=True)
    alone = receive(pipes[1])
    assert (alone["kind"], alone["rank"], alone["world"], alone["step"]) == ("begin", 0, 1, 3)

    _, place = workers.start(0)
    workers.join(place)
    assert receive(pipes[1])["kind"] == "regroup"


def test_before_the_first_epoch_one_is_replaced_and_the_others_wait(workers: Workers) -> None:
    process, _ = workers.start(0)
    _, other = workers.start(1)
    pipe = workers.join(other)
    process.kill()
    _, place = workers.start(0)
    workers.join(place)
    assert receive(pipe)["kind"] == "begin"


def test_who_is_dead_before_anybody_looks_is_replaced(workers: Workers) -> None:
    process = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    process.kill()
    process.communicate()
    workers.job.take(0, process.pid)
    workers.start(0)


def test_a_job_that_cannot_go_on_kills_its_workers_and_takes_no_more(workers: Workers) -> None:
    process, place = workers.start(0)
    other, its_place = workers.start(1)
    pipes = [workers.join(place), workers.join(its_place)]
    for pipe in pipes:
        receive(pipe)
    process.kill()
    receive(pipes[1])
    send(pipes[1], "ready", step=3, is_clean=False)
    assert other.wait(60) == -signal.SIGKILL
    with pytest.raises(MembershipError, match=r"between optimizer\.step"):
        workers.job.take(0, 1)


@pytest.mark.slow
def test_training_goes_on_in_the_process_that_is_left(tmp_path: Path) -> None:
    """As in test_ray.py, with real ranks and without Ray."""
    started: list[subprocess.Popen[bytes]] = []

    def start(job: RayJob, slot: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.integrations.ray_replicas", str(tmp_path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        rank = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE)
        started.append(rank)
        place = job.take(slot, rank.pid)
        line = json.dumps({"environ": place.environ, "meeting": str(place.meeting)})
        assert rank.stdin is not None
        rank.stdin.write(line.encode() + b"\n")
        rank.stdin.close()
        return rank

    try:
        with contextlib.closing(RayJob(ElasticPolicy(2, hold_s=200.0))) as job:
            dies, lives = start(job, 0), start(job, 1)
            assert dies.wait(DEADLINE_S) == -signal.SIGKILL
            assert start(job, 0).wait(DEADLINE_S) == lives.wait(DEADLINE_S) == 0
        ray_replicas.check(tmp_path)
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


def test_the_end(workers: Workers) -> None:
    pipes = [workers.join(workers.start(slot)[1]) for slot in (0, 1)]
    for pipe in pipes:
        receive(pipe)
    for pipe in pipes:
        send(pipe, "done", step=5)
    assert [receive(pipe)["kind"] for pipe in pipes] == ["release", "release"]
    with pytest.raises(MembershipError, match="it is complete"):
        workers.job.take(0, 1)
