from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.testing import RanksFailedError, run_ranks
from paceline.transport import exchange
from paceline.transport.messages import GroupMessages

CPU = torch.device("cpu")


def everybody() -> GroupMessages:
    return GroupMessages(dist.group.WORLD)


def test_bytes_of_any_length_reach_every_rank() -> None:
    def run() -> list[bytes]:
        return exchange.gather_bytes(everybody(), "a test", b"x" * (dist.get_rank() * 1000), CPU)

    assert run_ranks(3, run) == [[b"", b"x" * 1000, b"x" * 2000]] * 3


def test_json_and_integers() -> None:
    def run() -> tuple[list[object], list[int]]:
        rank = dist.get_rank()
        told = exchange.gather_json(everybody(), "a test", {"rank": rank, "none": None}, CPU)
        return told, exchange.broadcast_integers(everybody(), "a test", [rank, 7 + rank], CPU)

    told = [{"rank": 0, "none": None}, {"rank": 1, "none": None}]
    assert run_ranks(2, run) == [(told, [0, 7])] * 2


def test_a_size_is_checked_before_memory_is_set_aside() -> None:
    def run() -> None:
        exchange.MAX_MESSAGE_BYTES = 10
        exchange.gather_bytes(everybody(), "a test", b"x" * (11 * dist.get_rank()), CPU)

    with pytest.raises(RanksFailedError, match="a rank announces 11 bytes; at most 10 are taken"):
        run_ranks(2, run)
