"""What a rank says of itself when somebody asks: its account; and who it is: its watch info.

Written by a rank's watchdog, read by whoever makes a report. What a file says is not trusted: types
are checked, sizes are bounded.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

MAX_FILE_BYTES = 1 << 18
MAX_STACK = 8000

_T = TypeVar("_T", "Account", "WatchInfo")


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
        awaited: What the step waits for here: a bucket and its parameters.
        collectives: The latest ones, newest first.
        locks: Threads that wait for locks, in words; '' if none does.
        stack: Of all threads, the one that trains first.
    """

    rank: int
    token: str
    at_ns: int
    where: str = ""
    place: str = ""
    collective: str = ""
    is_waiting: bool = False
    is_compiling: bool = False
    awaited: str = ""
    collectives: tuple[str, ...] = ()
    locks: str = ""
    stack: str = ""


def write_json(path: Path, value: Account | WatchInfo) -> None:
    """Write a file, private to this user, whole or not at all.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    write_text(path, json.dumps(asdict(value)))


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_account(path: Path) -> Account | None:
    """Return an account; None if there is none that makes sense."""
    return _read(path, Account)


def read_watch_info(path: Path) -> WatchInfo | None:
    """Return a watch info; None if there is none that makes sense."""
    return _read(path, WatchInfo)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_FILE_BYTES))
        return kind(**{each.name: _checked(each.type, value[each.name]) for each in fields(kind)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


_TYPES = {"int": int, "str": str, "bool": bool}


def _checked(declared: Any, value: Any) -> Any:
    if str(declared).startswith("tuple"):
        return tuple(str(each) for each in list(value)[:20])
    if type(value) is not _TYPES[str(declared)]:
        raise TypeError(f"{value!r} is no {declared}")
    return value
