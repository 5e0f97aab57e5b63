"""The first to die is known, however late somebody looks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import permutations

import pytest

from paceline.liveness import Deaths, describe_process
from paceline.liveness.identity import Identity


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Three processes that wait for their end."""
    pids = [_idle() for _ in range(3)]
    yield pids
    for pid in pids:
        _kill(pid)
        os.waitpid(pid, 0)


def _idle() -> int:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def _kill(pid: int) -> None:
    """Kill, and wait until the kernel is done with it; it stays there as a zombie."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_order_is_that_of_the_deaths(children: list[int], order: tuple[int, ...]) -> None:
    deaths = Deaths()
    for key, pid in enumerate(children):
        deaths.watch(key, os.pidfd_open(pid), owned=True)
    assert deaths.look() == []
    for key in order:
        _kill(children[key])
    assert deaths.look() == list(order)
    assert deaths.look(60.0) == list(order)
    deaths.close()
    deaths.close()


def test_who_was_dead_before_is_first(children: list[int]) -> None:
    deaths = Deaths()
    _kill(children[2])
    deaths.watch(0, os.pidfd_open(children[0]), owned=True)
    deaths.watch(2, os.pidfd_open(children[2]), owned=True)
    _kill(children[0])
    assert deaths.look() == [2, 0]
    deaths.close()


def test_a_forked_child_sees_nobody_die_and_takes_nothing_from_its_parent(
    children: list[int],
) -> None:
    deaths = Deaths()
    deaths.watch(1, os.pidfd_open(children[1]), owned=True)
    _kill(children[1])
    child = os.fork()
    if child == 0:
        os._exit(len(deaths.look()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert deaths.look() == [1]
    deaths.close()


@pytest.mark.parametrize("value", [None, [], {"rank": 1}, {"rank": 2, "host": ""}], ids=str)
def test_what_is_no_identity_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="rank 1"):
        Identity.from_json(value, 1)
    told = describe_process(2).to_json()
    assert Identity.from_json(told, 2) == describe_process(2)
    with pytest.raises(ValueError, match="says that it is rank 2"):
        Identity.from_json(told, 1)
