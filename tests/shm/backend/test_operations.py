"""What the backend forwards, every kind of group has: nothing is left to gloo by a typo."""

from __future__ import annotations

import pytest

from paceline.shm.backend.operations import CrossHostOperations, HostOperations, Operations
from paceline.shm.backend.process_group import PacelineGroup

FORWARDED = sorted(
    {
        method.__name__
        for method in vars(PacelineGroup).values()
        if getattr(method, "__doc__", None) and "c10d's ``" in method.__doc__
    }
)


def test_all_are_found() -> None:
    assert len(FORWARDED) == 20


@pytest.mark.parametrize("name", FORWARDED)
def test_an_operation_is_there(name: str) -> None:
    assert callable(getattr(Operations, name))


@pytest.mark.parametrize("name", FORWARDED)
def test_one_host_does_all_but_point_to_point(name: str) -> None:
    is_left = getattr(HostOperations, name) is Operations._leave_to_inner
    assert is_left == (name in ("send", "recv", "recv_anysource"))


@pytest.mark.parametrize("name", FORWARDED)
def test_several_hosts_do_sums(name: str) -> None:
    is_left = getattr(CrossHostOperations, name) is Operations._leave_to_inner
    assert is_left == (name not in ("allreduce", "allreduce_coalesced"))
