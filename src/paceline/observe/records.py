"""What a rank records of each step: the words that recorder, live table, report and doctor share.

Written by the recorder, read by everything else in ``observe`` and by ``paceline report``. Must not
know how records are stored, nor anything of tensors and groups.

Stamps (``*_ns``) are nanoseconds of CLOCK_MONOTONIC, as ``time.perf_counter_ns`` returns them:
ranks of one host share that clock, ranks of different hosts do not. Zero means: it did not happen,
or was not seen.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Activity(enum.IntEnum):
    """What a rank is doing. It is in one of them from the begin of training to its end."""

    STARTING = 0
    """Entered when the recorder opens, left with the first forward."""

    INPUT = 1
    """Between two steps: the data loader, and whatever else the script does there."""

    FORWARD = 2
    """Inside of the wrapper's forward."""

    LOSS = 3
    """Between a forward and its backward: the loss, or another forward."""

    BACKWARD = 4
    """Autograd computes gradients; reductions run beside it."""

    WAITING = 5
    """All gradients are there; the backward waits for reductions, so for other ranks."""

    REDUCED = 6
    """The step is reduced and no optimizer has begun: gradient clipping, logging."""

    OPTIMIZER = 7
    """Inside of ``optimizer.step()``."""

    ENDED = 8
    """The process has ended in order, or with an exception that was seen."""


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step.

    Attributes:
        index: Its place in the order in which reductions start.
        bytes: Bytes of gradients.
        ready_ns: When its last gradient arrived on this rank.
        began_ns: When this rank started its reduction.
        ended_ns: When the reduced values were there.
    """

    index: int
    bytes: int
    ready_ns: int
    began_ns: int
    ended_ns: int


@dataclass(frozen=True)
class StepRecord:
    """One synchronised step of one wrapper on one rank, in the order in which things happen.

    Attributes:
        step: Counts the reduced steps of the wrapper, from 1.
        wrapper: Counts the wrappers of the process, from 0.
        began_ns: When the step before had ended; input begins here.
        forward_began_ns: Of the first forward of this step, accumulated ones included.
        forward_ended_ns: Of the last forward.
        backward_began_ns: Of the backward that reduces.
        backward_ended_ns: When its last gradient was computed.
        reduced_ns: When the last bucket was reduced.
        optimizer_began_ns: Of the first ``optimizer.step()`` after the backward.
        optimizer_ended_ns: Of the last; the step ends here (or with ``reduced_ns``).
        buckets: All of them, in plan order.
        loss: As given to ``paceline.log(loss=...)``; NaN if it was not.
        samples: Of this rank in this step, as far as known; else 0.
        cpu_ns: CPU time of the whole process since it was last asked for; 0: it was not. It is, in
            every step of 50 ms and more.
        run_delay_ns: How long its threads were ready to run and had no core, since it was last
            asked for; 0: it was not. 1 means none.
        major_faults: Pages that had to come from disk; asked for together with ``cpu_ns``.
        stolen_ns: How long the hypervisor kept its cores, in the mean over those that it may use,
            since it was last asked for; 0: it was not. It is about once a second. 1 means none.
        is_skipped: Left out by ``nonfinite="skip"``.
        is_joined: This rank had run out of inputs and only took part in the others' collectives
            (``join``).
        numbers: What else was given to ``paceline.log(...)`` in this step, by name.
    """

    step: int
    wrapper: int
    began_ns: int
    forward_began_ns: int
    forward_ended_ns: int
    backward_began_ns: int
    backward_ended_ns: int
    reduced_ns: int
    optimizer_began_ns: int = 0
    optimizer_ended_ns: int = 0
    buckets: tuple[BucketTimes, ...] = ()
    loss: float = math.nan
    samples: int = 0
    cpu_ns: int = 0
    run_delay_ns: int = 0
    major_faults: int = 0
    stolen_ns: int = 0
    is_skipped: bool = False
    is_joined: bool = False
    numbers: tuple[tuple[str, float], ...] = ()

    @property
    def ended_ns(self) -> int:
        """When the step was over."""
        return max(self.reduced_ns, self.optimizer_ended_ns)

    @property
    def duration_ns(self) -> int:
        """From the end of the step before to the end of this one."""
        return self.ended_ns - self.began_ns

    @property
    def waited_ns(self) -> int:
        """How long this rank had all of its gradients and waited for reductions."""
        return max(0, self.reduced_ns - self.backward_ended_ns)


@dataclass(frozen=True)
class BucketInfo:
    """What a bucket holds, from ``first_step`` on: buckets are cut anew after the first step."""

    wrapper: int
    index: int
    bytes: int
    parameters: tuple[str, ...]
    first_step: int = 1


@dataclass(frozen=True)
class RankInfo:
    """Who wrote a file of records.

    Attributes:
        rank: In the whole job.
        local_rank: On its host.
        world: How many ranks there were when it began.
        host: Its name.
        pid: Its process.
        threads: Intra-op threads when training began.
        cores: How many CPUs it may use.
        core_list: Which, as the kernel lists them (``"0-3,8"``); empty if that is not known.
        transport: What gradients travel over, and why (``"shm"``, ``"c10d:gloo"``).
        wall_minus_monotonic_ns: What to add to a stamp to get nanoseconds since 1970.
        buckets: What each bucket holds.
    """

    rank: int
    local_rank: int
    world: int
    host: str
    pid: int
    threads: int
    cores: int
    transport: str
    transport_reason: str
    wall_minus_monotonic_ns: int
    buckets: tuple[BucketInfo, ...] = ()
    core_list: str = ""


@dataclass(frozen=True)
class Status:
    """What a rank does at this moment: one small area that it overwrites, readable at any time.

    Attributes:
        activity: What it is doing.
        since_ns: Since when.
        step: The step it is in; 0 before the first.
        beat_ns: When it last wrote anything.
        loss: The newest; NaN if none was given.
        samples_per_s: Over the last steps; 0 if unknown.
        waiting_share: Share of the last steps that it spent waiting, 0 to 1.
        last_rank: The rank whose buckets came last in the last steps; -1 if nobody.
        rss_bytes: Memory of the process.
        detail: More words: the module whose forward runs, the exception it ended with.
        before_end: What it was doing when it ended; None if it has not, or if that is not known.
    """

    activity: Activity
    since_ns: int
    step: int
    beat_ns: int
    loss: float = math.nan
    samples_per_s: float = 0.0
    waiting_share: float = 0.0
    last_rank: int = -1
    rss_bytes: int = 0
    detail: str = ""
    before_end: Activity | None = None


@dataclass(frozen=True)
class Note:
    """Something that happened on a rank, in words: a warning, a membership change, a stall."""

    at_ns: int
    kind: str
    text: str


@dataclass(frozen=True)
class RankHistory:
    """All that a reader gets from one rank's file: the newest records that still fit in it."""

    info: RankInfo
    status: Status
    steps: tuple[StepRecord, ...]
    notes: tuple[Note, ...] = ()
