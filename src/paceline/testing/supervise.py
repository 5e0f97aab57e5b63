"""How the caller of ``run_ranks`` watches its ranks until all are done or the time is up.

Called by :mod:`paceline.testing.ranks`, which starts the ranks and clears them away. Knows pipes,
exit codes and clocks, not what the ranks compute.
"""

from __future__ import annotations

import contextlib
import re
import time
from multiprocessing.connection import wait

from paceline.launch.child import Child, ForkServerError
from paceline.launch.exits import exit_summary
from paceline.launch.stacks import StackFile, collect_stacks
from paceline.testing.failures import Outcome, RankFailure, RanksFailedError
from paceline.testing.payload import unpack
from paceline.testing.rank_process import FunctionRaised, Returned

_EXIT_WAIT_S = 10.0  # for a rank that has returned to be gone
# In a stack, most recent call first: from the frame that calls fn to the end of the thread.
_FRAMES_OF_OURS = re.compile(r'  File "[^"]*rank_process\.py", line \d+ in _run\n(  File .*\n)*')


class RankHandle:
    """The caller's end of one rank: its process, its stacks, and what became of it."""

    def __init__(self, rank: int, child: Child, notes: StackFile) -> None:
        self.rank = rank
        self.child = child
        self.notes = notes
        self.report: Returned | FunctionRaised | None = None

    def wait_started(self) -> None:
        """Wait until the process is there.

        Raises:
            ForkServerError: It will never be.
        """
        try:
            assert self.child.pid
        except ForkServerError as error:
            raise ForkServerError(f"rank {self.rank} could not be started: {error}") from error

    def wait_report(self) -> None:
        """Take the rank's message; if it has died without one, leave `report` as None."""
        with contextlib.suppress(EOFError, OSError):
            if self.child.pipe.poll():
                self.report = unpack(self.child.pipe.recv_bytes())
                return
        self.child.wait(_EXIT_WAIT_S)

    def close(self) -> None:
        """Wait until the process is gone, and let go of all descriptors."""
        self.child.wait()
        self.child.close()

    def read_notes(self) -> str:
        """Return what the rank has written down so far, without the frames that start a rank."""
        return _FRAMES_OF_OURS.sub("", self.notes.read())


def supervise(
    call: str, handles: list[RankHandle], *, timeout_s: float, grace_s: float
) -> list[bytes]:
    """Wait for every rank and return their packed values, or raise what happened.

    Raises:
        RanksFailedError: Naming every rank that did not return.
    """
    watch = _Watch(handles, timeout_s, grace_s)
    watch.wait_reports()
    if not watch.failures:
        watch.wait_exits()
    if watch.failures:
        raise RanksFailedError(call, watch.failures, timeout_s=timeout_s)
    return [h.report.value for h in handles if isinstance(h.report, Returned)]


class _Watch:
    """The clock of one call and the failures seen so far, in the order in which they happened."""

    def __init__(self, handles: list[RankHandle], timeout_s: float, grace_s: float) -> None:
        self.handles = handles
        self.failures: list[RankFailure] = []
        self._heard: set[RankHandle] = set()
        self._grace_s = grace_s
        self._start_s = time.monotonic()
        self._until_s = self._start_s + timeout_s

    def wait_reports(self) -> None:
        """Collect reports until all are in; at the deadline note where the rest were."""
        silent = list(self.handles)
        while silent:
            signs = [sign for h in silent for sign in (h.child.pipe, h.child.sentinel)]
            ready = wait(signs, timeout=max(0.0, self._until_s - time.monotonic()))
            if not ready:
                self._note_stopped(silent)
                return
            for handle in silent:
                if handle.child.pipe in ready or handle.child.sentinel in ready:
                    self._take_report(handle)
            silent = [h for h in silent if h not in self._heard]

    def wait_exits(self) -> None:
        """Let all ranks go, now that all have returned, and note those that do not end cleanly."""
        for handle in self.handles:
            handle.child.pipe.close()
        until_s = time.monotonic() + _EXIT_WAIT_S
        for handle in self.handles:
            handle.child.wait(max(0.0, until_s - time.monotonic()))
        lingering = [h for h in self.handles if h.child.is_running()]
        _collect_stacks(lingering)
        for handle in self.handles:
            if handle in lingering:
                what = f"returned, but its process did not end within {_EXIT_WAIT_S:g} s"
                self._note(handle, Outcome.LINGERED, what, handle.read_notes())
            elif handle.child.exit_code:
                what = f"returned, then {exit_summary(handle.child.exit_code)} while shutting down"
                self._note(handle, Outcome.LINGERED, what, handle.read_notes())

    def _take_report(self, handle: RankHandle) -> None:
        self._heard.add(handle)
        handle.wait_report()
        if isinstance(handle.report, Returned):
            return
        if isinstance(handle.report, FunctionRaised):
            summary = f"raised {handle.report.summary}"
            self._note(handle, Outcome.RAISED, summary, handle.report.traceback)
        else:
            code = handle.child.exit_code
            summary = "closed its pipe and lives on" if code is None else exit_summary(code)
            if code is not None and code >= 0:
                summary += " before it returned"
            self._note(handle, Outcome.EXITED, summary, handle.read_notes())
        self._until_s = min(self._until_s, time.monotonic() + self._grace_s)

    def _note_stopped(self, stuck: list[RankHandle]) -> None:
        why = "still running at the deadline"
        if self.failures:
            why = f"still running {self._grace_s:g} s after rank {self.failures[0].rank} failed"
        _collect_stacks(stuck)
        for handle in stuck:
            stacks = handle.read_notes() or "(no stack: it did not answer the signal)"
            self._note(handle, Outcome.STOPPED, f"{why}, killed", stacks)

    def _note(self, handle: RankHandle, outcome: Outcome, summary: str, detail: str) -> None:
        after_s = time.monotonic() - self._start_s
        self.failures.append(RankFailure(handle.rank, outcome, summary, detail, after_s))


def _collect_stacks(handles: list[RankHandle]) -> None:
    collect_stacks([(handle.child, handle.notes) for handle in handles])
