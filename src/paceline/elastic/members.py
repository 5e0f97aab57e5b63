"""Members of an elastic job, its policy, and what the coordinator may be told to do: plain data.

Made by :mod:`paceline.elastic.membership`, carried out by :mod:`paceline.elastic.coordinator`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


class MemberState(enum.Enum):
    """Where a member is in the life of an epoch."""

    STARTING = "starting"
    """Its process runs, and has not come to ``train(state)``."""

    WAITING = "waiting"
    """It is there, and has never been in an epoch."""

    TRAINING = "training"
    """It is in the epoch, as far as anybody knows."""

    READY = "ready"
    """It has left its epoch and said what it has committed."""

    DONE = "done"
    """``train(state)`` has returned; it stays in case that others need its state."""


@dataclass
class Member:
    """One process of the job.

    Attributes:
        slot: Names its log and its records. No two that live have the same.
        step: What it has committed, as far as it has said so.
        is_clean: No optimizer has stepped since.
        is_leaving: It is not part of the next epoch.
        is_spare: It comes as far as ``train(state)`` and waits there until a rank dies.
        host: Where it runs.
    """

    id: int
    slot: int
    state: MemberState = MemberState.STARTING
    step: int = -1
    is_clean: bool = True
    is_leaving: bool = False
    is_spare: bool = False
    is_terminated: bool = False  # it asked to leave, and will not stay
    host: int = 0

    @property
    def is_training(self) -> bool:
        """It is in the epoch, as far as anybody knows."""
        return self.state is MemberState.TRAINING


def best_of(inside: Iterable[Member]) -> Member | None:
    """Whose state counts: [Note: the source] in membership.py."""
    return max(inside, key=lambda w: (w.is_clean, w.step, not w.is_leaving), default=None)


@dataclass(frozen=True)
class ElasticPolicy:
    """What ``paceline run --elastic`` was told.

    Attributes:
        ranks: How many there are to be.
        minimum: Fewer than this do not train; the job waits.
        spares: How many members wait at ``train(state)`` to take the place of one that dies.
        hold_s: How long to wait for a replacement before the others go on without it.
        wait_s: After this long below the minimum the job ends.
        respond_s: A member that is told that its epoch is over and does not answer for this long
            counts as dead, and is killed.
        early_deaths: So many deaths of one slot in a row, each before a single step was committed,
            end the job.
        first_pause_s: The pause before the second replacement in such a row; doubled each time.
        hosts: How many hosts the job begins with, at least.
        max_hosts: More hosts than this are turned away. Once so many are there, it begins at once.
        gather_s: Otherwise it waits this long for more than ``hosts``.
        replaces: Whether members that die are replaced; if not, the job goes on without them.
        begins_alone: Members have no group of their own to begin with: each comes to
            ``train(state)`` alone, as a replacement does, and the first epoch copies a state.
    """

    ranks: int
    minimum: int = 1
    spares: int = 0
    hold_s: float = 0.0
    wait_s: float = 300.0
    respond_s: float = 30.0
    early_deaths: int = 5
    first_pause_s: float = 0.2
    hosts: int = 1
    max_hosts: int = 1
    gather_s: float = 0.0
    replaces: bool = True
    begins_alone: bool = False


# --- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """Start a member.

    Attributes:
        is_first: One of those that begin the job together.
        host: Where.
        attempt: Numbers the attempts to begin, for those that meet in one.
        world: How many begin together.
    """

    member: int
    slot: int
    is_first: bool
    host: int = 0
    attempt: int = 0
    world: int = 1


@dataclass(frozen=True)
class Kill:
    """End a member's process; its death is reported as any other."""

    member: int
    why: str


@dataclass(frozen=True)
class End:
    """Tell a member that its epoch is over, and why: it leaves whatever it waits in.

    Attributes:
        after: The step that it commits first, because those that have left have; -1: none.
    """

    member: int
    why: str
    after: int = -1


@dataclass(frozen=True)
class Regroup:
    """Ask a member to leave its epoch after a step, together with the others."""

    member: int


@dataclass(frozen=True)
class Begin:
    """Tell a member its place in the next epoch.

    Attributes:
        source: The rank whose state counts.
        step: What the source has committed.
        copies: Some rank has to copy the source's state, so all take part in it.
        is_first: The group of the ranks is there already: they were started together.
    """

    member: int
    epoch: int
    rank: int
    world: int
    source: int
    step: int
    copies: bool
    is_first: bool


@dataclass(frozen=True)
class Release:
    """Let a member go: the job is done, or it was asked to leave.

    Attributes:
        saves: Nobody goes on, and this one holds the highest committed step.
    """

    member: int
    saves: bool = False


@dataclass(frozen=True)
class Fail:
    """End the job."""

    why: str


Action: TypeAlias = Fork | Kill | End | Regroup | Begin | Release | Fail
