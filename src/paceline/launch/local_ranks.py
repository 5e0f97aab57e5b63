"""The ranks of this host, as the launcher holds them: process, output, and how each ended.

Used by ``job.py``, which has the loop and decides; this file starts, asks and signals.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from paceline.launch.child import Child
from paceline.launch.environment import RankPlace
from paceline.launch.failure import TAIL_LINES, RankEnd
from paceline.launch.fork_server import ForkServer
from paceline.launch.memory_events import explain_sigkill
from paceline.launch.output import LogFile, RankStream
from paceline.launch.script import Raised, read_raised, run_rank
from paceline.launch.shutdown import TimedSignal
from paceline.launch.target import Target
from paceline.launch.wire import EndPolicy
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.last_seen import last_activity
from paceline.observe.stall.stacks import innermost_place

# If the launcher is killed; and what becomes of processes that a rank has left in its session.
_ORPHANED = EndPolicy(first=signal.SIGTERM, grace_s=3.0)
_LINGER_S = 10.0
_CRASH = "Fatal Python error: "
_CRASH_LINES = 200


class LocalRank:
    """One rank of this host."""

    def __init__(self, place: RankPlace, child: Child, streams: list[RankStream], log: LogFile):
        self.place = place
        self.child = child
        self.streams = streams
        self.log = log
        self.raised: Raised | None = None
        self.was_stopped = False
        self._note = ""
        self._has_traceback = False

    @classmethod
    def start(
        cls,
        server: ForkServer,
        place: RankPlace,
        target: Target,
        environ: dict[str, str],
        log: LogFile,
        streams: list[RankStream],
        main: Callable[..., int] = run_rank,
    ) -> LocalRank:
        """Fork it and give it its order, to call ``main``. Does not wait."""
        child = server.fork(_ORPHANED, streams=(0, streams[0].writer, streams[1].writer))
        for stream in streams:
            stream.close_writer()
        child.run(main, target, place.rank, environ)
        return cls(place, child, streams, log)

    def hear_words(self) -> None:
        """Take what it says of its end, if it has said something."""
        if self.raised is None:
            self.raised = read_raised(self.child.pipe)

    def hear(self) -> bool:
        """Read what its pipe has. Say whether it has ended.

        Raises:
            ForkServerError: There could be no process for it.
        """
        self.child.wait_started()
        self.hear_words()
        return self.child.wait(0.0) is not None

    def send(self, timed: TimedSignal, *, by_launcher: bool) -> None:
        """Signal it, if it runs."""
        if self.child.exit_code is None:
            self.was_stopped |= by_launcher
            self.child.send_signal(timed.number, group=timed.is_for_group)

    def finish(self, oom_kills_before: int | None) -> None:
        """It has ended: take what it has written last."""
        self.hear()
        for stream in self.streams:
            stream.read_rest()
        self.log_traceback()
        code = self.child.exit_code or 0
        if code == -signal.SIGKILL and not self.was_stopped:
            self._note = explain_sigkill(oom_kills_before)
        elif code < 0 and not self.was_stopped:
            self._note = crash_place(self.log.tail(_CRASH_LINES))

    def until_lingering_s(self) -> float | None:
        """Seconds until it has raised long ago and has not ended; None if that is not so."""
        if self.raised is None or self._has_traceback or self.child.exit_code is not None:
            return None
        return max(0.0, self.raised.at_ns / 1e9 + _LINGER_S - time.monotonic())

    def log_traceback(self) -> None:
        """Put the traceback of its exception into its log, once."""
        if self.raised is not None and self.raised.traceback and not self._has_traceback:
            self._has_traceback = True
            self.log.write_traceback(self.raised.traceback)

    def end(self, folder: RunFolder) -> RankEnd:
        """How it ended, for :mod:`paceline.launch.failure`."""
        is_silent = self.raised is None and self.child.exit_code != 0
        return RankEnd(
            rank=self.place.rank,
            pid=self.child.pid,
            exit_code=self.child.exit_code,
            ended_ns=self.child.ended_ns,
            was_stopped=self.was_stopped,
            raised=self.raised,
            log=str(folder.log(self.place.rank)),
            tail=self.log.tail(TAIL_LINES),
            note=self._note,
            last_seen=last_activity(folder, self.place.rank) if is_silent else "",
        )

    def close(self) -> None:
        """Let go; what it has left behind is ended."""
        self.child.close()
        for stream in self.streams:
            stream.close()
        self.log.close()


def crash_place(lines: Sequence[str]) -> str:
    """Where Python was when a process crashed, by what faulthandler wrote; '' if it did not."""
    _, crashed, stack = "\n".join(lines).rpartition(_CRASH)
    place = innermost_place(stack.partition("\n\n")[2]) if crashed else ""
    return f"at {place}" if place else ""


def rank_streams(
    log: LogFile, show: Callable[[int, bytes], None] | None, rank: int
) -> list[RankStream]:
    """Pipes for stdout and stderr; rank 0 is shown as it is, others with their number."""
    prefix = f"[{rank}] ".encode() if rank else b""
    return [RankStream(number, log, show, prefix) for number in (1, 2)]


def error_file(folder: str, rank: int) -> str:
    """Where torch's ``@record`` writes what a rank has raised."""
    return os.path.join(folder, f"rank{rank}.error.json")
