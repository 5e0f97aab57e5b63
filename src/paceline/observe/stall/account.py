"""What a rank says of itself when somebody asks: its account; and who it is: its watch info.

Written by a rank's watchdog, read by whoever makes a report. What a file says is not trusted: types
are checked, sizes are bounded.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.observe.private_file import write_whole
from paceline.observe.untrusted import MAKES_NO_SENSE, MAX_PID, read_fields

MAX_FILE_BYTES = 1 << 18
MAX_STACK = 8000


@dataclass(frozen=True)
class WatchInfo:
    """Which process a rank is, and how it can be asked for its stacks.

    Attributes:
        rank: In the whole job.
        host: Its name.
        space: Equal for processes that see each other's pids.
        pid: The process.
        started: When it began, in ticks: with the pid it names one process for good.
        thread: The watchdog's, as the kernel counts: where the signal goes.
        signal: The signal that makes it write its stacks; 0: there is none.
        trains_in: The thread that trains, as faulthandler writes it.
    """

    rank: int
    host: str
    space: str
    pid: int
    started: int
    thread: int
    signal: int
    trains_in: str


@dataclass(frozen=True)
class Account:
    """What a rank is doing, as it sees itself.

    Attributes:
        rank: Whose.
        token: Of the question that it answers.
        at_ns: When (CLOCK_MONOTONIC of its host).
        where: For people: 'forward of encoder.3', 'waiting for the data loader'.
        place: File, line and function of the user's; '' if there is none.
        collective: The collective that it is in; '' if none.
        is_waiting: It does nothing but wait for other ranks.
        is_compiling: torch.compile is at work.
        is_evaluating: It is in a forward of no step.
        awaited: What the step waits for here: a bucket and its parameters.
        collectives: The latest ones, newest first.
        locks: Threads that wait for locks, in words; '' if none does.
        stack: Of all threads, the one that trains first.
        usual_wait_s: How long it waits for others in a usual step, as far as was seen.
    """

    rank: int
    token: str
    at_ns: int
    where: str = ""
    place: str = ""
    collective: str = ""
    is_waiting: bool = False
    is_compiling: bool = False
    is_evaluating: bool = False
    awaited: str = ""
    collectives: tuple[str, ...] = ()
    locks: str = ""
    stack: str = ""
    usual_wait_s: float = 0.0


def write_json(path: Path, value: Account | WatchInfo) -> None:
    """Write it as JSON.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    write_whole(path, json.dumps(asdict(value)))


def read_account(path: Path) -> Account | None:
    """Return an account; None if there is none that makes sense."""
    try:
        return read_fields(path, Account, MAX_FILE_BYTES)
    except MAKES_NO_SENSE:
        return None


def read_watch_info(path: Path) -> WatchInfo | None:
    """Return a watch info; None if there is none that makes sense."""
    try:
        found = read_fields(path, WatchInfo, MAX_FILE_BYTES)
    except MAKES_NO_SENSE:
        return None
    # A signal is sent by what it says: to a process and a thread, never to a group.
    is_process = 0 < found.pid <= MAX_PID and 0 < found.thread <= MAX_PID
    is_signal = found.signal == 0 or signal.SIGRTMIN <= found.signal <= signal.SIGRTMAX
    return found if is_process and is_signal else None
