"""Who takes part in an elastic job, as its launcher wrote it down in the run folder.

Read by the live table, ``paceline doctor``, stall reports and ``paceline report``. Without such a
file a job is not elastic, and everybody takes part. Must not know how membership is decided.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.records import RankInfo

_MAX_BYTES = 4 << 20
"""Of a longer file the end is read: 10,000 changes and more."""
_MAX_WORDS = 2000

PHASES = ("noticed", "agreed", "rebuilt", "copied")
"""Of a change, in order; the file has them as ``noticed_s`` and so on."""


class Standing(enum.Enum):
    """What a rank's process is to its job."""

    MEMBER = "member"
    """It trains, or did until the job was over."""

    SPARE = "spare"
    """It waits to take the place of a rank that dies, or has just been started to join."""

    LEFT = "left"
    """Its process is gone, and the others have gone on without it."""


@dataclass(frozen=True)
class MembershipChange:
    """From this moment on others took part than before; the first is the begin of the job.

    Attributes:
        at_s: Seconds since 1970.
        epoch: Counts the changes, from 0.
        world: How many ranks take part.
        step: The committed step that they go on from.
        why: What ended the epoch before.
        host: Whose launcher has written it.
        pids: Processes of that host that take part, by the number of their files; None if it is
            not written.
        phases_s: How long each of PHASES took.
    """

    at_s: float
    epoch: int
    world: int
    step: int
    why: str = ""
    host: str = ""
    pids: Mapping[int, int] | None = None
    phases_s: tuple[float, ...] = (0.0,) * len(PHASES)

    @property
    def took_s(self) -> float:
        """From the moment when ranks noticed it until they trained again."""
        return sum(self.phases_s)

    def place_of(self, rank: int) -> int:
        """The number of the files of a rank: ranks are counted in the order of their places."""
        if self.pids is None or len(self.pids) != self.world or not 0 <= rank < self.world:
            return rank
        return sorted(self.pids)[rank]


def read_membership(path: Path) -> tuple[MembershipChange, ...]:
    """Return all changes that can be read; none if the job is not elastic."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_BYTES))
            lines = file.read(_MAX_BYTES).split(b"\n")
    except OSError:
        return ()
    found = (_parse(line) for line in lines)
    return tuple(change for change in found if change is not None)


def standing_of(info: RankInfo, changes: Sequence[MembershipChange], *, is_gone: bool) -> Standing:
    """Say what a process is to the job; of another host's processes nothing is known.

    Args:
        info: Which process. A place may get a new one.
        changes: Of the job.
        is_gone: The process has ended.
    """
    newest = changes[-1] if changes else None
    if newest is None or newest.pids is None or info.host != newest.host:
        return Standing.MEMBER
    if newest.pids.get(info.rank) == info.pid:
        return Standing.MEMBER
    return Standing.LEFT if is_gone else Standing.SPARE


def is_of_earlier_job(info: RankInfo, first: RankInfo) -> bool:
    """Say whether a file was left by a job with more ranks, in a folder that was used again.

    Args:
        info: Who wrote the file.
        first: Who wrote that of the lowest rank, which every job writes anew.
    """
    return info.world != first.world and info.rank >= first.world > first.rank


def _parse(line: bytes) -> MembershipChange | None:
    try:
        found = json.loads(line)
        pids = found.get("pids")
        change = MembershipChange(
            at_s=_number(found["at_s"]),
            epoch=int(_number(found["epoch"])),
            world=int(_number(found["world"])),
            step=int(_number(found["step"])),
            why=_text(found.get("why", "")),
            host=_text(found.get("host", "")),
            pids=None if pids is None else {int(k): int(pid) for k, pid in pids.items()},
            phases_s=tuple(_number(found.get(f"{name}_s", 0.0)) for name in PHASES),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return change


def _text(value: Any) -> str:
    return str(value)[:_MAX_WORDS].encode("utf-8", "replace").decode()  # no half characters


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number
