"""What a new coordinator knows: reports of the launchers, put together. Pure.

[Note: taking over]
A coordinator keeps nothing on disk. If it dies, the launchers know all that counts: which members
live, in which epoch each is, and what it has said last. A launcher connects to the new coordinator
and reports that. The new one waits until all hosts of the latest epoch have reported, or until it
has run for a lease: then ranks that nobody has reported are stopped ([Note: leases]). What a
launcher says after its report, while others have not reported, is heard when all have.

If all ranks of that epoch are there and train, nothing happens: they do not hear of it. Otherwise
(a rank died meanwhile, or the epoch was just ending or beginning) the epoch is ended, each rank
says where it stands, and the next one begins as after any death. Epochs are counted on.

Who waits at ``train(state)`` and is in no epoch counts as a spare at first: the membership takes as
many of them as it needs. Counts of early deaths begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.elastic.members import Member, MemberState


@dataclass
class MemberReport:
    """What a launcher knows of a member.

    Attributes:
        epoch: The one that it is in, or has left last; -1: none.
        attempt: The attempt to begin that it was started for; -1: it joins later.
    """

    id: int
    slot: int
    state: str = MemberState.STARTING.value
    step: int = -1
    is_clean: bool = True
    is_terminated: bool = False
    epoch: int = -1
    attempt: int = -1

    def to_member(self, host: int) -> Member:
        """As the membership has it."""
        state = MemberState(self.state)
        is_outside = state in (MemberState.STARTING, MemberState.WAITING)
        return Member(
            int(self.id),
            int(self.slot),
            state,
            int(self.step),
            bool(self.is_clean),
            is_leaving=bool(self.is_terminated),
            is_spare=is_outside and self.attempt < 0,
            is_terminated=bool(self.is_terminated),
            host=host,
        )


@dataclass
class HostReport:
    """What a launcher knows of the job.

    Attributes:
        epoch: The latest that it has heard of.
        world: Ranks of that epoch; before the first: those that are to begin together.
        hosts: Theirs.
        next_id: Higher than all members that it has heard of.
        scaled_to: What somebody has asked for; 0: nobody has.
        exits: Why members of this host have ended, lately.
        outcome: Why the job has ended; None: it has not, as far as this host knows.
    """

    epoch: int = -1
    world: int = 0
    hosts: list[int] = field(default_factory=list)
    next_id: int = 0
    scaled_to: int = 0
    exits: list[str] = field(default_factory=list)
    outcome: str | None = None
    members: list[MemberReport] = field(default_factory=list)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> HostReport:
        """From a message.

        Raises:
            TypeError, ValueError: It is not one.
        """
        members = [MemberReport(**each) for each in plain["members"]]
        return cls(**{**plain, "members": members})

    def to_plain(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @property
    def knows_something(self) -> bool:
        """Whether there was a job before."""
        return self.epoch >= 0 or bool(self.members) or self.outcome is not None


@dataclass(frozen=True)
class Takeover:
    """What all reports together say.

    Attributes:
        epoch: The latest that anybody has begun.
        members: All that live.
        is_whole: All of that epoch are there and train in it, and nobody else does.
        why: What to say if not.
        scaled_to: How many ranks somebody has asked for; 0: nobody has.
    """

    epoch: int
    members: list[Member]
    is_whole: bool
    why: str
    scaled_to: int = 0


def is_complete(reports: dict[int, HostReport]) -> bool:
    """Whether all hosts have reported that had ranks in the latest epoch."""
    latest = _latest(reports.values())
    return set(latest.hosts) <= reports.keys()


def put_together(reports: dict[int, HostReport]) -> Takeover:
    """Find out where the job stands."""
    latest = _latest(reports.values())
    found = [(host, each) for host, report in reports.items() for each in report.members]
    members = [each.to_member(host) for host, each in found]
    exits = [text for report in reports.values() for text in report.exits]
    scaled_to = max(report.scaled_to for report in reports.values())
    why = exits[-1] if exits else "the coordinator was lost while ranks changed"
    if latest.epoch < 0:
        attempts = {each.attempt for _, each in found}
        is_whole = len(found) == latest.world and len(attempts) == 1 and min(attempts) >= 0
        return Takeover(-1, members, is_whole, why, scaled_to)
    going_on = (MemberState.TRAINING.value, MemberState.DONE.value)
    inside = [each for _, each in found if each.epoch >= 0]
    is_whole = len(inside) == latest.world and all(
        each.epoch == latest.epoch and each.state in going_on for each in inside
    )
    return Takeover(latest.epoch, members, is_whole, why, scaled_to)


def _latest(reports: Iterable[HostReport]) -> HostReport:
    return max(reports, key=lambda report: (report.epoch, report.next_id))
