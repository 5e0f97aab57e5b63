"""Decides whether ranks wait for each other in different collectives: pure, and never a guess.

[Note: no false alarm]
A rank W waits in a channel for a rank P. That is a deadlock, whatever happens next, if

1. the thread of W that called the collective is inside of that very wait, and the thread of P that
   W waits for (the one that took part in the last collective here) is inside of another one. No
   other thread of W is inside of ``torch.distributed``;
2. the collective in which P waits needs W: one that returns nowhere before all ranks have called it
   (an all-reduce, a barrier), a broadcast or scatter from W, or a reduce or gather to P;
3. W has not begun that collective. For Paceline's own channels the rows of the native core say so:
   W is behind P. For any other c10d group its counts do: P has started more than W;
4. all other ranks that W waits for are waiting as well, and
5. all of this is the same at two looks, at least half a second apart.

Then P cannot return before W comes (2, 3), and W cannot come before P does (1). A slow rank, one in
a debugger or in an evaluation is not inside of a collective (1). A rank in a collective of other
ranks that will end does not need W (2), or W has long begun it (3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.shm.diagnose.thread_location import EVERYBODY, ThreadLocation
from paceline.torch_private.groups import collectives_started, default_group_or_none, group_named


@dataclass(frozen=True)
class Evidence:
    """Where a missing rank and this rank were, at one look; None: that thread has ended."""

    theirs: ThreadLocation | None
    ours: ThreadLocation | None


def find_deadlock(
    link: str, evidence: dict[int, Evidence], awaits_us: Callable[[str, int], bool]
) -> tuple[int, str] | None:
    """Return a rank that waits for this one, and the channel in which it does, if that is ours.

    Args:
        link: The channel in which this rank waits.
        evidence: About every rank that is missing; the same at two looks.
        awaits_us: Whether a rank waits in another channel of Paceline's for this one.
    """
    if not all(_is_stuck(each, link) for each in evidence.values()):
        return None
    for peer, each in evidence.items():
        theirs = each.theirs
        assert theirs is not None
        if theirs.link:
            if theirs.link != link and awaits_us(theirs.link, peer):
                return peer, theirs.link
        elif _needs_us(theirs):
            return peer, ""
    return None


def _is_stuck(each: Evidence, link: str) -> bool:
    theirs, ours = each.theirs, each.ours
    return (
        theirs is not None
        and ours is not None
        and theirs.is_waiting
        and ours.is_waiting
        and ours.link == link
    )


def _needs_us(theirs: ThreadLocation) -> bool:
    """Say whether a call of a c10d group that is not Paceline's needs this rank, and has not it."""
    group, everybody = group_named(theirs.group), default_group_or_none()
    if group is None or everybody is None:
        return False
    is_needed = theirs.needs in (EVERYBODY, str(everybody.rank()))
    return is_needed and collectives_started(group) < theirs.started
