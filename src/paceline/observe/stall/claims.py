"""Who makes the report of a stall, and what was reported: files in the run folder.

Used by each rank's watchdog; [Note: stalls] in this package's docstring. Numbers count from 1, and
go up by one with each stall of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.observe.private_file import write_whole
from paceline.observe.run_folder import RunFolder
from paceline.observe.untrusted import MAKES_NO_SENSE, MAX_PID, read_fields
from paceline.processes import ProcessState, process_space, process_state, start_ticks

REPORT_WAIT_S = 4.0
"""How long whoever has claimed a stall, and lives, may take for its report."""

_MAX_CLAIM_BYTES = 1 << 10
_MAX_SENTENCE_BYTES = 1 << 13


@dataclass(frozen=True)
class _Claimer:
    """Which process has claimed a stall; it may die before its report."""

    space: str
    pid: int
    started: int

    @classmethod
    def this_process(cls) -> _Claimer:
        pid = os.getpid()
        return cls(process_space(), pid, start_ticks(pid))


class Claims:
    """Stalls of one run, seen by one rank. What was there when it began is old."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._known = max(self._numbers("txt"), default=0)
        self._attempt = 1
        self._since_s = 0.0

    def newest_report(self) -> int:
        """The number of a report that this rank has not shown; 0 if there is none."""
        number = self._known + 1
        return number if self.has_report(number) else 0

    def next_number(self) -> int:
        """The number of the stall that comes next."""
        return self._known + 1

    def has_report(self, number: int) -> bool:
        """Whether the report of a stall is complete."""
        return self._folder.stall(number).exists()

    def claim(self, number: int) -> bool:
        """Try to be the one who reports a stall; say whether this rank is.

        Raises:
            OSError: No file can be made.
        """
        self._since_s = time.monotonic()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path(number), flags, 0o600)
        except FileExistsError:
            return False
        with contextlib.suppress(OSError), open(descriptor, "w") as file:
            json.dump(asdict(_Claimer.this_process()), file)
        return True

    def is_abandoned(self, number: int) -> bool:
        """Whether the claimer is gone or took too long, so that this rank now has the claim."""
        if self.has_report(number):
            return False
        is_late = time.monotonic() - self._since_s >= REPORT_WAIT_S
        if not is_late and not self._is_claimer_gone(number):
            return False
        self._attempt += 1
        try:
            return self.claim(number)
        except OSError:
            return True  # nobody can make a file any more: each says it on its own terminal

    def _path(self, number: int) -> Path:
        attempt = f"-{self._attempt}" if self._attempt > 1 else ""
        return self._folder.path / f"stall-{number}.claim{attempt}"

    def _is_claimer_gone(self, number: int) -> bool:
        """Whether it is dead or stopped, as far as can be seen from this host."""
        try:
            claimer = read_fields(self._path(number), _Claimer, _MAX_CLAIM_BYTES)
        except MAKES_NO_SENSE:
            return False  # not written yet, or never
        if claimer.space != process_space() or not 0 < claimer.pid <= MAX_PID:
            return False
        return process_state(claimer.pid, claimer.started) is not ProcessState.ALIVE

    def give_up(self, number: int) -> None:
        """It was no stall: let others claim the number again."""
        for path in self._folder.path.glob(f"stall-{number}.claim*"):
            path.unlink(missing_ok=True)
        self._attempt = 1

    def write_report(self, number: int, text: str) -> None:
        """Publish a report."""
        write_whole(self._folder.stall(number), f"{text}\n")

    def append(self, number: int, text: str) -> None:
        """Add a line to a report; nothing if it could not be written."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._folder.stall(number).open("r+") as file,
        ):
            file.seek(0, os.SEEK_END)
            file.write(text)

    def first_line(self, number: int) -> str:
        """What a report says first."""
        try:
            with self._folder.stall(number).open("rb") as file:
                text = file.read(_MAX_SENTENCE_BYTES).decode(errors="replace")
        except OSError:
            return f"Stall {number}."
        return text.split("\n", 1)[0]

    def forget(self, number: int) -> None:
        """This stall is over."""
        self._known = max(self._known, number)
        self._attempt = 1

    def _numbers(self, suffix: str) -> list[int]:
        try:
            names = [path.name for path in Path(self._folder.path).iterdir()]
        except OSError:
            return []
        found = (re.fullmatch(rf"stall-(\d+)\.{suffix}", name) for name in names)
        return [int(match[1]) for match in found if match]
