"""Who is on which host, and what a peer may claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.liveness import host_key
from paceline.shm.core.members import GroupMember, by_host, describe_self


def member(rank: int, host: str) -> GroupMember:
    return replace(describe_self(rank, 4096), host=host)


def test_ranks_are_grouped_by_host_in_order() -> None:
    members = [member(3, "b"), member(0, "b"), member(2, "a"), member(1, "c")]
    assert [[m.rank for m in host] for host in by_host(members)] == [[0, 3], [1], [2]]


def test_a_member_survives_json() -> None:
    mine = describe_self(2, 8192)
    assert GroupMember.from_json(mine.to_json(), 2) == mine


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rank": 1}, "no description"),
        (None, "no description"),
        ([], "no description"),
        ("x", "no description"),
    ],
)
def test_nonsense_from_a_peer_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"rank 1 sent {words}"):
        GroupMember.from_json(value, 1)


def test_a_peer_cannot_be_another_rank() -> None:
    with pytest.raises(ValueError, match="rank 1 says that it is rank 2"):
        GroupMember.from_json(describe_self(2, 0).to_json(), 1)


def test_the_variable_stands_in_for_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = host_key()
    assert host_key() == plain
    monkeypatch.setenv("PACELINE_HOST_ID", "one")
    one = host_key()
    monkeypatch.setenv("PACELINE_HOST_ID", "two")
    assert len({plain, one, host_key()}) == 3


def test_tokens_and_addresses_are_not_reused() -> None:
    found = [describe_self(0, 0) for _ in range(10)]
    assert len({m.token for m in found}) == 10
    assert len({m.address for m in found}) == 10
