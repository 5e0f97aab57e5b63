"""How ranks of a host end: told by each in its page, read by those who miss it.

Called by :mod:`paceline.shm.diagnose.errors` when a rank is lost. When this process ends,
:mod:`paceline.exit_reason` calls what is registered there. Must not wait for anybody.

[Note: first cause]
One rank ends with an exception; the next, which misses it, ends with a PeerLostError; a third that
comes later finds two ranks gone. So an ending says whose loss it is due to, by pid, and
:func:`first_cause` follows that to a rank that ended for a reason of its own.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline import exit_reason
from paceline.exit_reason import ExitReason
from paceline.native.extension import native
from paceline.printable import printable
from paceline.shm.core.members import GroupMember
from paceline.shm.core.pages import Field, Pages


class EndKind(enum.Enum):
    """In which way a rank ends."""

    EXCEPTION = "exception"
    """An exception that nobody caught, or one that was in flight when it left the group."""

    EXIT = "exit"
    """The program came to its end, or called ``sys.exit``."""


@dataclass(frozen=True)
class Ending:
    """What a rank said about its end.

    Attributes:
        how: In which way.
        text: Type, message and place of the exception.
        lost_pid: The process whose loss was the reason; 0 if it had a reason of its own.
        at_ns: When, by CLOCK_MONOTONIC, which ranks of a host have in common.
    """

    how: EndKind
    text: str
    lost_pid: int
    at_ns: int


class StatusPages:
    """What the ranks of a host say about themselves; this rank's own are written here."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.dead_threads: dict[int, str] = {}
        self._has_raised = False
        exit_reason.add_listener(self)

    def on_process_exit(self, reason: ExitReason) -> None:
        """Write down how this process ends: see :class:`paceline.exit_reason.Listener`."""
        if not reason.text and self._has_raised:
            return  # the end of the program adds nothing to the exception
        self._has_raised |= bool(reason.text)
        how = EndKind.EXCEPTION if reason.text else EndKind.EXIT
        value = {"how": how.value, "pid": reason.lost_pid, "at": time.monotonic_ns()}
        self.pages.write(Field.ENDING, value | {"text": reason.text})

    def on_thread_exit(self, ident: int, reason: ExitReason) -> None:
        """Keep what ended a thread: it may be the one that peers wait for."""
        self.dead_threads[ident] = reason.text

    def leave(self, error: BaseException | None) -> None:
        """This rank leaves the group, maybe because of an exception that is in flight."""
        if error is not None:
            self.on_process_exit(exit_reason.exit_reason_of(error))

    def ending(self, index: int) -> Ending | None:
        """What a rank has said about its end; None if nothing, or nothing that makes sense."""
        value = self.pages.read(index, Field.ENDING)
        if value is None:
            return None
        try:
            how, numbers = EndKind(value.get("how")), (int(value["pid"]), int(value["at"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return Ending(how, printable(value.get("text", "")), *numbers)


def first_cause(status: StatusPages, members: Sequence[GroupMember], about: int) -> int:
    """Follow the loss of one rank to the rank that it began with: [Note: first cause]."""
    by_pid = {member.pid: index for index, member in enumerate(members)}
    seen = {about}
    while (ending := status.ending(about)) is not None and ending.lost_pid in by_pid:
        cause = by_pid[ending.lost_pid]
        if cause in seen:
            break
        seen.add(cause)
        about = cause
    return about


def describe_end(status: StatusPages, index: int, row: Any) -> str:
    """Say how a rank that is gone came to its end, and where to look further.

    Args:
        status: What ranks have said.
        index: The rank.
        row: Its ``native.Row``.
    """
    is_alive, is_closed = row.is_alive, row.life == native.LIFE_CLOSED
    ending = status.ending(index)
    if ending is not None and ending.how is EndKind.EXCEPTION:
        left = "has left the group" if is_alive else "has died"
        return f"{left} after an exception: {ending.text}"
    if ending is not None or (is_closed and not is_alive):
        return "has left the group: its program has ended without an exception."
    if is_alive:
        return (
            "has left the group: destroy_process_group(), or its wrapper was deleted, as at the "
            "end of a function or of its program."
        )
    return (
        "has died without an exception of Python's: killed by a signal, ended by os._exit(), or "
        "crashed. Look at its log, and at the kernel's for a kill for lack of memory."
    )
