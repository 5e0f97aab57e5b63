"""Descriptors over a Unix socket: they arrive with their words, or none is left open."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest

from paceline.memory.descriptors import close_all, is_same_user, receive


def test_words_and_descriptors_arrive_together() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        assert is_same_user(receiver)
        read_end, write_end = os.pipe()
        socket.send_fds(sender, [b"two ends"], [read_end, write_end])
        close_all((read_end, write_end))
        words, (read_end, write_end) = receive(receiver, 100, 2)
        assert words == b"two ends"
        os.write(write_end, b"x")
        assert os.read(read_end, 1) == b"x"
        close_all((read_end, write_end))


def test_a_process_without_room_for_them_keeps_none() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        socket.send_fds(sender, [b"."], [sender.fileno()] * 3)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = sorted(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 1, limits[0]), limits[1]))
        fill: list[int] = []
        try:
            with contextlib.suppress(OSError):  # until there is none left
                while True:
                    fill.append(os.dup(0))
            os.close(fill.pop())  # room for one of three
            with pytest.raises(OSError, match="too few descriptors are allowed"):
                receive(receiver, 1, 3)
        finally:
            close_all(fill)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sorted(os.listdir("/proc/self/fd")) == before
