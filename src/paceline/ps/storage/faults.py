"""Named places where tests end a server. In production ``reach`` does nothing.

Called at the steps of decision 0007 between which a server may die. Tests install a function that
kills the process when the place they want has been reached often enough; see
``tests/ps/storage/test_recovery.py``, which also checks that each place is reached.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class FaultPoint(enum.Enum):
    """Where a server can be killed, in the order of a push and then of a snapshot."""

    CHECKED = "a push is checked, and not in the journal"
    APPENDED = "it is in the journal, and not applied"
    APPLIED = "it is applied, and not acknowledged"
    SENT = "it is acknowledged"
    ROTATED = "a new journal is begun, and the child is not forked"
    WRITING = "the child has written half of the snapshot"
    WRITTEN = "the snapshot is complete under its temporary name"
    RENAMED = "the snapshot has its name, and the parent does not know"
    CLEANING = "old files are not deleted yet"
    LOADED = "rows to load are in a file of the server, and the journal does not name it"


hook: Callable[[FaultPoint], None] | None = None


def reach(place: FaultPoint) -> None:
    """Say that this place has been reached."""
    if hook is not None:
        hook(place)
