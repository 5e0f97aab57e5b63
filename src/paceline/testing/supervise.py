"""How the caller of ``run_ranks`` watches its ranks until all are done or the time is up.

Called by :mod:`paceline.testing.ranks`, which starts the ranks and clears them away. Knows pipes,
exit codes and clocks, not what the ranks compute.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from paceline.testing.failures import Outcome, RankFailure, RanksFailedError, exit_summary
from paceline.testing.payload import unpack
from paceline.testing.rank_process import STACK_SIGNAL, Raised, Returned

_STACKS_WAIT_S = 1.0  # at most, for all ranks together, to write down their stacks
_EXIT_WAIT_S = 10.0  # for a rank that has returned to be gone
# In a stack, most recent call first: from the frame that calls fn to the end of the thread.
_FRAMES_OF_OURS = re.compile(r'  File "[^"]*rank_process\.py", line \d+ in _run\n(  File .*\n)*')


class RankHandle:
    """The caller's end of one rank: its process, its pipe, and what became of it."""

    def __init__(
        self, rank: int, process: ForkServerProcess, pipe: Connection, notes: Path
    ) -> None:
        self.rank = rank
        self.process = process
        self.pipe = pipe
        self.notes = notes
        self.report: Returned | Raised | None = None

    def is_running(self) -> bool:
        """Say whether the process exists."""
        return self.process.pid is not None and self.process.exitcode is None

    def wait_report(self) -> None:
        """Take the rank's message; if it has died without one, leave `report` as None."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                self.report = unpack(self.pipe.recv_bytes())
                return
        self.process.join(_EXIT_WAIT_S)

    def kill(self) -> None:
        """Kill the process if there is one. Does not wait."""
        if self.is_running():
            self.process.kill()

    def close(self) -> None:
        """Wait until the process is gone, and let go of all descriptors."""
        self.pipe.close()
        if self.process.pid is not None:
            self.process.join()
            self.process.close()

    def ask_stacks(self) -> None:
        """Make the rank write the stacks of its threads into its notes."""
        pid = self.process.pid
        if pid is not None and self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)

    def read_notes(self) -> str:
        """Return what the rank has written down so far, without the frames that start a rank."""
        try:
            text = self.notes.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return _FRAMES_OF_OURS.sub("", text)


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
            signs = [sign for h in silent for sign in (h.pipe, h.process.sentinel)]
            ready = wait(signs, timeout=max(0.0, self._until_s - time.monotonic()))
            if not ready:
                self._note_stopped(silent)
                return
            for handle in silent:
                if handle.pipe in ready or handle.process.sentinel in ready:
                    self._take_report(handle)
            silent = [h for h in silent if h not in self._heard]

    def wait_exits(self) -> None:
        """Let all ranks go, now that all have returned, and note those that do not end cleanly."""
        for handle in self.handles:
            handle.pipe.close()
        until_s = time.monotonic() + _EXIT_WAIT_S
        for handle in self.handles:
            handle.process.join(max(0.0, until_s - time.monotonic()))
        lingering = [h for h in self.handles if h.is_running()]
        _collect_stacks(lingering)
        for handle in self.handles:
            if handle in lingering:
                what = f"returned, but its process did not end within {_EXIT_WAIT_S:g} s"
                self._note(handle, Outcome.LINGERED, what, handle.read_notes())
            elif handle.process.exitcode:
                what = f"returned, then {exit_summary(handle.process.exitcode)} while shutting down"
                self._note(handle, Outcome.LINGERED, what, handle.read_notes())

    def _take_report(self, handle: RankHandle) -> None:
        self._heard.add(handle)
        handle.wait_report()
        if isinstance(handle.report, Returned):
            return
        if isinstance(handle.report, Raised):
            summary = f"raised {handle.report.summary}"
            self._note(handle, Outcome.RAISED, summary, handle.report.traceback)
        else:
            code = handle.process.exitcode
            summary = "closed its pipe and lives on" if code is None else exit_summary(code)
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
    """Ask for stacks and wait until each has written something and stopped writing."""
    for handle in handles:
        handle.ask_stacks()
    sizes: list[int] = []
    until_s = time.monotonic() + _STACKS_WAIT_S
    while handles and time.monotonic() < until_s:
        time.sleep(0.02)
        before, sizes = sizes, [len(h.read_notes()) for h in handles]
        if all(sizes) and sizes == before:
            return
