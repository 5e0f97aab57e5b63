"""What a process that is gone was doing, by the records that it left in the run folder.

Asked by whoever raises an error about a lost rank, and by ``paceline run``. Must not raise.
"""

from __future__ import annotations

import os

from paceline.errors import RecordsError
from paceline.observe.records import Activity
from paceline.observe.ring import read_info, read_status
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.observe.stall.threads import WORDS


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


def last_activity(folder: RunFolder, rank: int) -> str:
    """Return 'in forward, in step 6'; '' if nothing is known, or if it ended in order."""
    try:
        status = read_status(folder.events(rank))
    except (OSError, RecordsError):
        return ""
    if status.activity is Activity.ENDED:
        return ""
    step = f", in step {status.step}" if status.step else ""
    return f"{WORDS[status.activity]}{step}"
