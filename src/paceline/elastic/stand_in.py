"""Stands in for a rank, where the launcher ends all ranks as soon as one of them dies::

    torchrun --nproc-per-node 4 -m paceline.elastic.stand_in train.py --epochs 3

The launcher starts this process, and watches it; the rank is its child. If the rank dies while
others train on, the stand-in waits until they are done, and ends well if they have. Must not import
torch.

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
from typing import Any

from paceline.elastic.supervised.outcome import JOB, STAND_IN, wait_outcome
from paceline.launch.exits import exit_summary
from paceline.launch.kernel import die_with_parent
from paceline.memory import descriptors

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_USAGE = "usage: -m paceline.elastic.stand_in [-m MODULE | SCRIPT] [ARGUMENT ...]\n"


class StandIn:
    """Starts a rank, and waits: [Note: what a stand-in tells its launcher].

    Args:
        words: What to run, as for ``python``.
    """

    def __init__(self, words: list[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.getpid()
        with theirs:
            number = theirs.fileno()
            self._rank = subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, STAND_IN: f"{self._pid}:{number}"},
                pass_fds=[number],
                preexec_fn=self._begin,
            )
        for each in _FORWARDED:
            signal.signal(each, self._forward)

    def _begin(self) -> None:
        os.setpgid(0, 0)
        die_with_parent(self._pid)

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
    code = StandIn(words).wait()
    if code < 0:
        die_of(-code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
