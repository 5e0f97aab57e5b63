"""Descriptors go to processes of the same user that know the token, and to nobody else."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.memory.segment import create_segment
from paceline.shm.attach.fd_exchange import Deadline, FdExchange, FdExchangeClient

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"paceline-test-{os.getpid()}-{abs(hash(request.node.name))}"


def read(descriptor: int) -> bytes:
    return os.pread(descriptor, 16, 0)


def written(text: bytes) -> int:
    descriptor = create_segment("paceline-test", 4096)
    os.pwrite(descriptor, text, 0)
    return descriptor


def serve(exchange: FdExchange, ranks: range, timeout_s: float = 5.0) -> dict[int, list[int]]:
    """Collect one descriptor from each rank and hand all of them out."""
    found = exchange.collect(ranks, 1, Deadline(timeout_s))
    exchange.send_all([found[rank][0] for rank in ranks], Deadline(timeout_s))
    return found


def exchange_descriptors(
    address: str, token: str, rank: int, mine: list[int], expected: int, deadline: Deadline
) -> list[int]:
    """Send descriptors and take everybody's."""
    client = FdExchangeClient(address, token, rank, mine, deadline)
    try:
        return client.take(expected, deadline)
    finally:
        client.close()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    return thread, result


def close_all(*lists: list[int]) -> None:
    for descriptors in lists:
        for descriptor in descriptors:
            os.close(descriptor)


def test_more_descriptors_than_one_message_takes(address: str) -> None:
    mine = [written(b"number %03d" % number) for number in range(450)]
    with FdExchange(address, TOKEN) as exchange:
        thread, results = in_thread(
            lambda: exchange_descriptors(address, TOKEN, 1, mine[:1], len(mine), Deadline(20))
        )
        collected = exchange.collect(range(1, 2), 1, Deadline(20))
        exchange.send_all(mine, Deadline(20))
        thread.join()
    (received,) = results
    assert [read(fd)[:10] for fd in received] == [b"number %03d" % n for n in range(450)]
    close_all(received, mine, *collected.values())


@pytest.mark.parametrize("peers", [1, 3, 20])
def test_everybody_gets_everything_in_order(address: str, peers: int) -> None:
    ranks = range(1, peers + 1)
    mine = {rank: written(b"rank %03d" % rank) for rank in ranks}
    with FdExchange(address, TOKEN) as exchange:
        exchanges = [
            in_thread(
                lambda r=rank: exchange_descriptors(
                    address, TOKEN, r, [mine[r]], peers, Deadline(20)
                )
            )
            for rank in ranks
        ]
        collected = serve(exchange, ranks, timeout_s=60)
    for thread, _ in exchanges:
        thread.join()
    for _, (received,) in exchanges:
        assert [read(fd)[:8] for fd in received] == [b"rank %03d" % rank for rank in ranks]
        close_all(received)
    close_all(list(mine.values()), *collected.values())


@pytest.mark.parametrize("token", ["f" * 32, "", "0123", "x" * 200], ids=len)
def test_a_wrong_token_is_turned_away_and_the_right_one_still_served(
    address: str, token: str
) -> None:
    descriptor = written(b"secret")
    with FdExchange(address, TOKEN) as exchange:
        thread, served = in_thread(lambda: serve(exchange, range(1, 2)))
        with pytest.raises(OSError, match=r"gone away|reset|timed out"):
            exchange_descriptors(address, token, 1, [descriptor], 1, Deadline(5))
        received = exchange_descriptors(address, TOKEN, 1, [descriptor], 1, Deadline(5))
        thread.join()
    assert read(received[0])[:6] == b"secret"
    close_all(received, [descriptor], *served[0].values())


def as_other_user(address: str, pipe: Any) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        pipe.send(
            (
                "got",
                exchange_descriptors(address, TOKEN, 1, [os.open("/dev/null", 0)], 1, Deadline(3)),
            )
        )
    except OSError as error:
        pipe.send(("refused", type(error).__name__))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_turned_away_even_with_the_token(address: str) -> None:
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    with FdExchange(address, TOKEN) as exchange:
        process = context.Process(target=as_other_user, args=(address, far))
        process.start()
        with pytest.raises(TimeoutError):
            exchange.collect(range(1, 2), 1, Deadline(1.5))
    process.join()
    assert near.recv()[0] == "refused"
    near.close()
    far.close()
    process.close()


def test_a_peer_that_never_comes_ends_in_time(address: str) -> None:
    with FdExchange(address, TOKEN) as exchange, pytest.raises(TimeoutError):
        exchange.collect(range(1, 2), 1, Deadline(0.2))


def test_a_peer_that_says_nothing_does_not_block_the_others(address: str) -> None:
    descriptor = written(b"x")
    with FdExchange(address, TOKEN) as exchange:
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect("\0" + address)
        silent.shutdown(socket.SHUT_WR)
        thread, served = in_thread(lambda: serve(exchange, range(1, 2)))
        received = exchange_descriptors(address, TOKEN, 1, [descriptor], 1, Deadline(5))
        thread.join()
        silent.close()
    close_all(received, [descriptor], *served[0].values())


def test_nobody_listens(address: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        exchange_descriptors(address, TOKEN, 1, [], 1, Deadline(1))
