"""Stands in for a rank, where the launcher ends all ranks as soon as one of them dies::

    torchrun --nproc-per-node 4 -m paceline.elastic.stand_in train.py --epochs 3

The launcher starts this process, and watches it; the rank is its child. If the rank dies while
others train on, the stand-in waits until they are done, and ends well if they have. A rank that
forks by itself (:mod:`paceline.elastic.supervised.own_stand_in`) runs this file in its place. Must
not import torch.

[Note: what a stand-in tells its launcher]
- The rank ends well: at once.
- The rank fails and is in no elastic job (before ``train(state)``, or after it): at once, and as
  the rank did. Launchers then do what they always do.
- The rank fails in an elastic job: when the job is over. If that ended well, all is well. If it did
  not (nobody is left, or its supervisor was killed), as the rank did.
- Signals go on to the rank, which is in a process group of its own so that it gets each once. The
  kernel kills it if the stand-in is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Protocol

from paceline.elastic.supervised.outcome import JOB, STAND_IN, wait_outcome
from paceline.launch.exits import exit_summary
from paceline.launch.kernel import die_with_parent
from paceline.memory import descriptors

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ADOPT = "--adopt"
"""The word before a child that is there already, and the number of the socket to it."""
_USAGE = "usage: -m paceline.elastic.stand_in [-m MODULE | SCRIPT] [ARGUMENT ...]\n"


class Rank(Protocol):
    """The process of a rank."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, as ``Popen`` has it, if it has ended."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""

    def wait(self) -> int:
        """Wait for its end."""


class ForkedRank:
    """A child of this process that was there before the program that runs in it now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """See :class:`Rank`."""
        return self._code

    def send_signal(self, number: int) -> None:
        """See :class:`Rank`."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self) -> int:
        """See :class:`Rank`."""
        _, status = os.waitpid(self.pid, 0)
        self._code = os.waitstatus_to_exitcode(status)
        return self._code


def start(words: list[str]) -> StandIn:
    """Start a rank, as ``python`` with these words would."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stand_in = os.getpid()

    def begin() -> None:
        os.setpgid(0, 0)
        die_with_parent(stand_in)

    with theirs:
        number = theirs.fileno()
        rank = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, STAND_IN: f"{stand_in}:{number}"},
            pass_fds=[number],
            preexec_fn=begin,
        )
    return StandIn(rank, ours)


class StandIn:
    """Waits for a rank: [Note: what a stand-in tells its launcher]."""

    def __init__(self, rank: Rank, ours: socket.socket) -> None:
        self._rank, self._socket = rank, ours
        for each in _FORWARDED:
            signal.signal(each, self._forward)

    def _forward(self, number: int, _: Any) -> None:
        if self._rank.poll() is None:
            self._rank.send_signal(number)
        else:
            die_of(number)

    def wait(self) -> int:
        """Wait for the rank, and for its job if it fails in one; return how to end."""
        code = self._rank.wait()
        job = self._find_job()
        if not code or job is None:
            return code
        who = f"rank {os.environ.get('RANK', '')} (pid {self._rank.pid})"
        _say(f"{who} {exit_summary(code)}; the other ranks may go on, and are waited for")
        is_well = wait_outcome(job)
        _say(f"the other ranks have {'ended well' if is_well else 'failed, too'}")
        return 0 if is_well else code

    def _find_job(self) -> int | None:
        """The outcome of the job that the rank was in when it ended; None if it was in none."""
        found: int | None = None
        self._socket.setblocking(False)
        with self._socket, contextlib.suppress(BlockingIOError):
            while True:
                text, files = descriptors.receive(self._socket, 64, 1)
                if not text:
                    break  # nobody holds the other end
                if found is not None:
                    os.close(found)
                found = files[0] if text == JOB else None
        return found


def die_of(number: int) -> None:
    """End as a process that a signal has ended."""
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"paceline: {text}\n".encode())


def main(words: list[str]) -> int:
    """Run a rank."""
    if not words:
        sys.stderr.write(_USAGE)
        return 2
    if words[0] == ADOPT:
        pid, number = (int(word) for word in words[1:])
        code = StandIn(ForkedRank(pid), socket.socket(fileno=number)).wait()
    else:
        code = start(words).wait()
    if code < 0:
        die_of(-code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
