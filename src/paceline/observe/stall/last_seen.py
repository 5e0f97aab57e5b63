"""What a process that is gone was doing, by the records that it left in the run folder.

Asked by whoever raises an error about a lost rank, and by ``paceline run``. Must not raise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from paceline.errors import RecordsError
from paceline.observe.records import Activity
from paceline.observe.ring import read_info, read_status
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.observe.stall.threads import WORDS
from paceline.printable import printable
from paceline.processes import host_name


def last_seen(pid: int) -> str:
    """Return ' It was last seen in forward, in step 6.'; '' if nothing is known."""
    path = os.environ.get(RUN_DIR)
    if not path:
        return ""
    folder = RunFolder(path)
    try:
        for rank in folder.ranks():
            if read_info(folder.events(rank)).pid == pid:
                words = last_activity(folder, rank)
                return f" It was last seen {words}." if words else ""
    except (OSError, RecordsError):
        return ""
    return ""


def ended_first(pids: Iterable[int]) -> tuple[int, str]:
    """Return which of these processes of this host ended first with an exception, and with which.

    If none has, the first that ended without one, and ''; 0 and '' if none has ended, as far as is
    known. A process says so before it takes its groups down.
    """
    path, wanted = os.environ.get(RUN_DIR), set(pids)
    found: list[tuple[bool, int, int, str]] = []
    with contextlib.suppress(OSError):
        folder = RunFolder(path or "")
        for rank in folder.ranks() if path and wanted else ():
            with contextlib.suppress(OSError, RecordsError):
                info, status = read_info(folder.events(rank)), read_status(folder.events(rank))
                is_one = info.pid in wanted and info.host == host_name()
                if is_one and status.activity is Activity.ENDED:
                    words = printable(status.detail)
                    found.append((not words, status.since_ns, info.pid, words))
    return min(found)[2:] if found else (0, "")


def last_activity(folder: RunFolder, rank: int) -> str:
    """Return 'in forward, in step 6': before it ended, if it has; '' if nothing is known."""
    try:
        status = read_status(folder.events(rank))
    except (OSError, RecordsError):
        return ""
    activity, step = status.activity, f"in step {status.step}" if status.step else ""
    if activity is Activity.ENDED:
        activity = status.before_end or activity
        if status.detail and step:
            return step  # the exception has left what it was in; its place says that
    return ", ".join(filter(None, (WORDS[activity], step)))
