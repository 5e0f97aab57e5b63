"""Where a thread of this process is, as a peer that waits for it wants to know.

Asked by :mod:`paceline.shm.diagnose.wait_monitor`, rarely: it walks the frames of a thread that
may go on running meanwhile. Must not wait, and must not keep a frame.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.exit_reason import is_library
from paceline.liveness import watch
from paceline.observe.stall.places import walk_out
from paceline.torch_private.groups import (
    C10D_FILE,
    collectives_started,
    default_group_or_none,
    registered_name,
)

EVERYBODY = "everybody"
# Functions of torch.distributed that return on no rank before all ranks have called them, and those
# that need one rank: the argument that names it.
_MEETINGS = frozenset(
    (
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_to_all",
        "all_to_all_single",
        "barrier",
    )
)
_FROM_ONE = {"broadcast": "src", "scatter": "src"}
_TO_ONE = {"reduce": "dst", "gather": "dst"}
_KNOWN = _MEETINGS | _FROM_ONE.keys() | _TO_ONE.keys()
_COLLECTIVES = Path(__file__).parents[1] / "collectives"
_OURS = {
    (str(_COLLECTIVES / "group.py"), "_hand_in"),
    (str(_COLLECTIVES / "pending.py"), "wait"),
}
_WATCH_FILE = watch.__file__
_WATCHES = frozenset(("wait", "wait_future", "wait_until", "call"))
_SHOWN = 160
"""Characters of a name or a place that are told."""


@dataclass(frozen=True)
class ThreadLocation:
    """What a thread is doing. Travels as JSON.

    Attributes:
        call: The function of ``torch.distributed`` or the reduction that it is in; empty for none.
        place: File, line and function of the user's that it is at.
        is_waiting: It is inside of a function that does nothing but wait for other ranks.
        mark: Equal as long as the thread has not moved.
        link: The channel of Paceline's in which it waits; empty for none.
        group: The name of the c10d group in which it waits; empty for none.
        started: How many operations of that group this process has started.
        needs: Whom that operation needs: the global rank, EVERYBODY, or nobody (empty).
    """

    call: str = ""
    place: str = ""
    is_waiting: bool = False
    mark: str = ""
    link: str = ""
    group: str = ""
    started: int = 0
    needs: str = ""

    @classmethod
    def from_json(cls, value: Any) -> ThreadLocation:
        """Check what a peer said.

        Raises:
            ValueError: If it is something else.
        """
        blank = cls()
        for name, default in vars(blank).items():
            if not isinstance(value, dict) or type(value.get(name)) is not type(default):
                raise ValueError(f"a peer sent no location: {name}")
        return cls(**{name: value[name] for name in vars(blank)})

    def describe(self) -> str:
        """For people."""
        if self.call:
            of = f" of group {self.group!r}" if self.group else ""
            return f"in {self.call}{of}, called at {self.place}"
        return f"in no collective, at {self.place}" if self.place else "in no code of Python's"


def locate_thread(ident: int) -> ThreadLocation | None:
    """Say what a thread is doing; None if it has ended."""
    innermost = sys._current_frames().get(ident)
    return None if innermost is None else _describe(innermost)


def watched_wait(ident: int) -> str:
    """Say for what a thread waits over a process group (:mod:`paceline.liveness.watch`), if so."""
    for frame in walk_out(sys._current_frames().get(ident)):
        code = frame.f_code
        if code.co_filename == _WATCH_FILE and code.co_name in _WATCHES:
            return str(frame.f_locals.get("what", ""))[:_SHOWN]
    return ""


def uses_c10d_elsewhere(ident: int) -> bool:
    """Say whether another thread than this one is inside of ``torch.distributed``."""
    frames = sys._current_frames()
    return any(
        any(_is_c10d(frame) for frame in walk_out(innermost))
        for other, innermost in frames.items()
        if other != ident
    )


def _describe(innermost: FrameType) -> ThreadLocation:
    frames = list(walk_out(innermost))
    library = []
    for frame in frames:
        if not is_library(frame.f_code.co_filename):
            break
        library.append(frame)
    user = frames[len(library)] if len(library) < len(frames) else frames[-1]
    code = user.f_code
    place = f"{code.co_filename[-_SHOWN:]}:{user.f_lineno}, in {code.co_name[:_SHOWN]}"
    mark = f"{id(innermost)}/{innermost.f_lasti}"
    calls = [frame for frame in library if _is_c10d(frame)]
    if calls:
        return _collective(innermost, calls, place, mark)
    if _is_ours(innermost):
        return ThreadLocation("a reduction of gradients", place, True, mark, _link(innermost))
    return ThreadLocation(place=place, mark=mark)


def _collective(
    innermost: FrameType, calls: list[FrameType], place: str, mark: str
) -> ThreadLocation:
    """Describe a call of torch.distributed, whose frames are given from the inside."""
    inner, outer = calls[0], calls[-1]
    name = inner.f_code.co_name
    found = inner.f_locals
    group = found.get("group") or default_group_or_none()
    known = registered_name(group) if group is not None else None
    is_waiting = _is_waiting(innermost) and name in _KNOWN and known is not None
    return ThreadLocation(
        call=f"torch.distributed.{outer.f_code.co_name[:_SHOWN]}",
        place=place,
        is_waiting=is_waiting,
        mark=mark,
        link=_link(innermost) if _is_ours(innermost) else "",
        group=known or "",
        started=0 if group is None or known is None else collectives_started(group),
        needs=_needs(name, found) if is_waiting else "",
    )


def _needs(name: str, arguments: dict[str, Any]) -> str:
    if name in _MEETINGS:
        return EVERYBODY
    one = arguments.get(_FROM_ONE.get(name) or _TO_ONE[name])
    if not isinstance(one, int):
        return ""  # given as a rank of the group: left to the time-out
    if name in _FROM_ONE:
        return str(one)
    return EVERYBODY if one == _own_rank() else ""


def _own_rank() -> int:
    group = default_group_or_none()
    return int(group.rank()) if group is not None else -1


def _is_c10d(frame: FrameType) -> bool:
    return frame.f_code.co_filename == C10D_FILE


def _is_ours(frame: FrameType) -> bool:
    return (frame.f_code.co_filename, frame.f_code.co_name) in _OURS


def _is_waiting(innermost: FrameType) -> bool:
    """In torch's C++ (gloo's wait) or in our native core, nowhere in between."""
    return (_is_c10d(innermost) and innermost.f_code.co_name in _KNOWN) or _is_ours(innermost)


def _link(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    explain = getattr(owner, "_explain", None)
    group = getattr(explain, "__self__", owner)
    return str(getattr(group, "link", ""))
