"""The watchdog of a rank: a thread that sleeps, looks, and speaks when something takes too long.

Started by :mod:`paceline.observe.stall.start` with the first wrapper of a process that records into
a run folder. It reads what the rank records about itself, so that a step costs nothing. What it
does at a stall: [Note: stalls] in this package. Nothing that goes wrong here may disturb
the training: a disk that is full costs the report, and is said once.

A forked child has no watchdog. The thread ends with the last wrapper, and with the process.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass

from paceline.errors import RecordsError
from paceline.forks import Owner
from paceline.observe.records import Activity, Status
from paceline.observe.ring import read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.account import Account, WatchInfo, write_json
from paceline.observe.stall.claims import Claims
from paceline.observe.stall.own_account import describe_self
from paceline.observe.stall.patience import Patience
from paceline.observe.stall.probes import probes
from paceline.observe.stall.report import name_culprit, report_text
from paceline.observe.stall.stacks import StackWriter
from paceline.observe.stall.views import look_at_ranks
from paceline.observe.untrusted import read_bounded
from paceline.processes import host_name, process_space, start_ticks

logger = logging.getLogger("paceline")

_TICKS = (0.1, 1.0)
_ANSWER_S = 1.5
_CLOSE_S = 5.0
_MAX_TOKEN = 64
_SHOWN_STACKS = 4
"""On the terminal; the file has all."""
_NO_HARM = " If that is meant to take so long, nothing is wrong."


class WatchdogPhase(enum.Enum):
    """What the watchdog thinks of the training."""

    QUIET = enum.auto()
    """Nothing is wrong."""

    ALARMED = enum.auto()
    """This rank is over its budget, or another one is; the report is being made."""

    TOLD = enum.auto()
    """The report was shown. Left when this rank has ended a step."""


@dataclass
class _Stall:
    """A stall, as this rank sees it."""

    number: int
    step: int
    began_s: float
    is_mine: bool = False


class Watchdog:
    """Looks after one rank.

    Args:
        folder: Of the run.
        rank: This one.
        stall_after_s: What counts as a stall; None: learned.

    Raises:
        OSError: The run folder is not writable.
    """

    def __init__(self, folder: RunFolder, rank: int, stall_after_s: float | None) -> None:
        self._folder, self._rank = folder, rank
        self._patience = Patience(folder, rank, stall_after_s)
        shortest_s = self._patience.budget.shortest_s
        self._tick_s = min(max(shortest_s / 8, _TICKS[0]), _TICKS[1])
        self._claims = Claims(folder)
        self._stacks = StackWriter(folder.stacks(rank))
        self._asked = self._read_ask()
        self._phase = WatchdogPhase.QUIET
        self._stall: _Stall | None = None
        self._last = Status(Activity.STARTING, 0, 0, 0)
        self._has_complained = False
        self._owner = Owner()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Not in a forked child, which has none."""
        if not self._owner.is_here():
            return
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    @property
    def is_alive(self) -> bool:
        """Whether it looks after this process."""
        return self._owner.is_here() and self._thread.is_alive() and not self._wake.is_set()

    def _run(self) -> None:
        try:
            self._introduce()
            while not self._wake.wait(self._tick_s):
                self._look()
            self._look()  # a stall that ends with the training has an end, too
        except Exception:
            logger.exception("stalls will not be reported any more; training goes on")
        finally:
            self._stacks.close()

    def _introduce(self) -> None:
        thread = next((probe.thread for probe in probes()), threading.main_thread().ident or 0)
        pid = os.getpid()
        info = WatchInfo(
            rank=self._rank,
            host=host_name(),
            space=process_space(),
            pid=pid,
            started=start_ticks(pid),
            thread=threading.get_native_id(),
            signal=self._stacks.signal,
            trains_in=f"0x{thread:016x}",
        )
        self._try(lambda: write_json(self._folder.watch(self._rank), info))

    # --- looking -------------------------------------------------------------------------------

    def _look(self) -> None:
        asked = self._read_ask()
        if asked != self._asked:
            self._asked = asked
            account = self._describe_self(asked)
            self._try(lambda: write_json(self._folder.account(self._rank), account))
        try:
            status = read_status(self._folder.events(self._rank))
        except (OSError, RecordsError):
            return
        self._patience.learn(self._last, status)
        self._follow(status)
        self._last = status

    def _follow(self, status: Status) -> None:
        if self._phase is not WatchdogPhase.QUIET and self._is_over(status):
            self._tell_end()
        elif self._phase is WatchdogPhase.QUIET:
            number = self._claims.newest_report()
            if number:  # another rank was first
                self._begin(number, status)
                self._show(number)
            elif self._patience.is_stalled(status):
                self._raise_alarm(status)
        elif self._phase is WatchdogPhase.ALARMED:
            self._wait_report(status)

    def _describe_self(self, asked: str) -> Account:
        usual_s = self._patience.budget.usual_wait_s
        return describe_self(self._folder, self._rank, asked, usual_s)

    def _is_over(self, status: Status) -> bool:
        stall = self._stall
        return stall is not None and status.step > stall.step

    # --- telling -------------------------------------------------------------------------------

    def _begin(self, number: int, status: Status, *, is_mine: bool = False) -> None:
        self._phase = WatchdogPhase.ALARMED
        self._stall = _Stall(number, status.step, time.monotonic(), is_mine)

    def _raise_alarm(self, status: Status) -> None:
        number = self._claims.next_number()
        try:
            is_mine = self._claims.claim(number)
        except OSError as error:  # no file can be made: say it here, at least
            self._complain(error)
            is_mine = True
        self._begin(number, status, is_mine=is_mine)
        if is_mine:
            self._make_report(number)

    def _wait_report(self, status: Status) -> None:
        stall = self._stall
        assert stall is not None
        if self._claims.has_report(stall.number):
            self._show(stall.number)
        elif self._claims.is_abandoned(stall.number) and self._patience.is_stalled(status):
            self._begin(stall.number, status, is_mine=True)
            self._make_report(stall.number)

    def _make_report(self, number: int) -> None:
        own = self._describe_self("")
        views = look_at_ranks(self._folder, _ANSWER_S + self._tick_s, own)
        if self._patience.is_excused(views):
            self._claims.give_up(number)
            self._phase, self._stall = WatchdogPhase.QUIET, None
            return
        self._asked = self._read_ask()
        title, more = f"Stall {number}: ", _NO_HARM if self._patience.is_of_nobody else ""
        text = report_text(views, title, more)
        self._try(lambda: self._claims.write_report(number, text))
        path = self._folder.stall(number)
        shown = report_text(views, title, more, most=_SHOWN_STACKS)
        self._say(
            f"{shown}\n\n  This is in {path}; `paceline doctor {self._folder.path}` looks again."
        )
        self._note(f"stall {number}: {name_culprit(views)}")
        self._phase = WatchdogPhase.TOLD

    def _show(self, number: int) -> None:
        """Say on this rank what another one has found."""
        first = self._claims.first_line(number)
        self._say(f"{first}\n  The whole report is in {self._folder.stall(number)}.")
        self._note(first)
        self._phase = WatchdogPhase.TOLD

    def _tell_end(self) -> None:
        stall, self._stall, self._phase = self._stall, None, WatchdogPhase.QUIET
        assert stall is not None
        self._claims.forget(stall.number)
        if stall.is_mine:
            what = f"step {stall.step}" if stall.step else "training"
            text = (
                f"Stall {stall.number} is over: {what} went on "
                f"{time.monotonic() - stall.began_s:.1f} s after the report."
            )
            self._try(lambda: self._claims.append(stall.number, f"\n{text}\n"))
            self._say(text)
            self._note(text)

    def _say(self, text: str) -> None:
        _print(f"\n[paceline, rank {self._rank}] {text}\n")

    def _note(self, text: str) -> None:
        from paceline.observe.recording import note  # it may start a recorder, which starts us

        note("stall", text)

    # --- files ---------------------------------------------------------------------------------

    def _read_ask(self) -> str:
        try:
            return read_bounded(self._folder.ask, _MAX_TOKEN).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def _try(self, write: object) -> None:
        """Write something; if that cannot be, say so once."""
        assert callable(write)
        try:
            write()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "rank %d: stall reports cannot be written into %s: %s. They are on the terminal "
                "only, and training goes on.",
                self._rank,
                self._folder.path,
                error.strerror or error,
            )


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed terminal
        print(text, file=sys.stderr, flush=True)
