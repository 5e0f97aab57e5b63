"""Jobs whose truth is known: simulated ranks, with delays put into chosen phases of chosen steps.

The simulation knows what a reducer does (buckets are ready in turn, a reduction begins when the
last rank has started it, one at a time, and ends on all ranks) and nothing of how a report works.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.observe.records import (
    Activity,
    BucketInfo,
    BucketTimes,
    Note,
    RankHistory,
    RankInfo,
    Status,
    StepRecord,
)
from paceline.observe.ring import EventWriter
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.report.phases import Phase
from paceline.report.run import Run, RunState

MS = 1_000_000
MIB = 1024 * 1024
START_NS = 1_000 * 1_000 * MS


@dataclass(frozen=True)
class Delay:
    """Makes one rank slower, in one phase, in some steps."""

    rank: int
    phase: Phase
    ms: float
    steps: Callable[[int], bool] = lambda step: True
    cpu: float = 0.0
    """The share of the delay that the process computes."""
    run_delay: float = 0.0
    """The share of the delay in which it has no core."""
    faults: int = 0
    stolen: float = 0.0
    """The share of the delay in which the hypervisor has its cores."""


@dataclass(frozen=True)
class Job:
    """A simulated run."""

    ranks: int = 4
    steps: int = 60
    usual_ms: dict[Phase, float] = field(
        default_factory=lambda: {
            Phase.OPTIMIZER: 8.0,
            Phase.INPUT: 4.0,
            Phase.FORWARD: 20.0,
            Phase.LOSS: 1.0,
            Phase.BACKWARD: 40.0,
        }
    )
    bucket_bytes: tuple[int, ...] = (MIB, 25 * MIB, 25 * MIB, 10 * MIB)
    ready_at: tuple[float, ...] = (0.2, 0.5, 0.8, 1.0)
    """When each bucket is ready, as a share of backward."""
    reduce_ms: tuple[float, ...] = (1.0, 5.0, 5.0, 2.0)
    delays: tuple[Delay, ...] = ()
    jitter: float = 0.0
    """The standard deviation of every phase, as a share of it."""
    hosts: tuple[str, ...] = ("alpha",)
    """Rank r runs on host r modulo their number."""
    clock_ms: tuple[float, ...] = (0.0,)
    """How far each host's clock is ahead."""
    drift_ppm: tuple[float, ...] = (0.0,)
    threads: int = 1
    cores: int = 8
    transport: str = "shm"
    samples: int = 32
    seed: int = 0
    notes: tuple[tuple[int, Note], ...] = ()
    has_counts: bool = True
    forward_waits_for: int | None = None
    """A rank that sends its buffers at the begin of every forward."""


def simulate(job: Job) -> tuple[RankHistory, ...]:
    """Return what the ranks of a job would have recorded."""
    records: list[list[StepRecord]] = [[] for _ in range(job.ranks)]
    at = [START_NS] * job.ranks
    chance = random.Random(job.seed)
    for step in range(1, job.steps + 1):
        ready, partial = [], []
        inputs = [
            at[rank] + _took(job, rank, step, Phase.INPUT, chance) for rank in range(job.ranks)
        ]
        for rank in range(job.ranks):
            draft, times = _compute(job, rank, step, at[rank], inputs, chance)
            partial.append(draft)
            ready.append(times)
        ends = _reduce(job, ready)
        for rank, draft in enumerate(partial):
            record, at[rank] = _finish(job, rank, step, draft, ready[rank], ends, chance)
            records[rank].append(record)
    return tuple(_history(job, rank, records[rank]) for rank in range(job.ranks))


def _took(job: Job, rank: int, step: int, phase: Phase, chance: random.Random) -> int:
    usual = job.usual_ms[phase] * max(0.0, 1 + job.jitter * chance.gauss(0, 1))
    late = sum(delay.ms for delay in _delays(job, rank, step) if delay.phase is phase)
    return round((usual + late) * MS)


def _delays(job: Job, rank: int, step: int) -> list[Delay]:
    return [delay for delay in job.delays if delay.rank == rank and delay.steps(step)]


def _compute(
    job: Job, rank: int, step: int, began: int, inputs: list[int], chance: random.Random
) -> tuple[StepRecord, list[int]]:
    forward = inputs[rank]
    sender = job.forward_waits_for
    computes = forward if sender is None else max(forward, inputs[sender])
    forward_ended = computes + _took(job, rank, step, Phase.FORWARD, chance)
    backward = forward_ended + _took(job, rank, step, Phase.LOSS, chance)
    lasts = _took(job, rank, step, Phase.BACKWARD, chance)
    ready = [backward + round(lasts * share) for share in job.ready_at]
    draft = StepRecord(step, 0, began, forward, forward_ended, backward, backward + lasts, 0)
    return draft, ready


def _reduce(job: Job, ready: list[list[int]]) -> list[int]:
    ends: list[int] = []
    free = 0
    for bucket, ms in enumerate(job.reduce_ms):
        starts = max(free, *(max(times[: bucket + 1]) for times in ready))
        free = starts + round(ms * MS)
        ends.append(free)
    return ends


def _finish(
    job: Job,
    rank: int,
    step: int,
    draft: StepRecord,
    ready: list[int],
    ends: list[int],
    chance: random.Random,
) -> tuple[StepRecord, int]:
    reduced = max(*ends, draft.backward_ended_ns)
    optimizer = reduced + round(0.1 * MS)
    ended = optimizer + _took(job, rank, step, Phase.OPTIMIZER, chance)
    buckets = tuple(
        BucketTimes(index, job.bucket_bytes[index], ready[index], max(ready[: index + 1]), end)
        for index, end in enumerate(ends)
    )
    delays = _delays(job, rank, step)
    usual = sum(job.usual_ms.values())
    counts = int(job.has_counts)
    record = replace(
        draft,
        reduced_ns=reduced,
        optimizer_began_ns=optimizer,
        optimizer_ended_ns=ended,
        buckets=buckets,
        loss=2.0 * math.exp(-step / 40) + 0.1,
        samples=job.samples,
        cpu_ns=counts * round((usual + sum(delay.ms * delay.cpu for delay in delays)) * MS),
        run_delay_ns=counts * round(sum(delay.ms * delay.run_delay for delay in delays) * MS),
        major_faults=sum(delay.faults for delay in delays),
        stolen_ns=counts * max(1, round(sum(each.ms * each.stolen for each in delays) * MS)),
    )
    return record, ended


def _history(job: Job, rank: int, records: Sequence[StepRecord]) -> RankHistory:
    at = rank % len(job.hosts)
    names = tuple(f"layers.{index}.weight" for index in range(len(job.bucket_bytes)))
    buckets = tuple(
        BucketInfo(0, index, size, (names[index],)) for index, size in enumerate(job.bucket_bytes)
    )
    info = RankInfo(
        rank=rank,
        local_rank=rank // len(job.hosts),
        world=job.ranks,
        host=job.hosts[at],
        pid=4000 + rank,
        threads=job.threads,
        cores=job.cores,
        transport=job.transport,
        transport_reason="all ranks share memory",
        wall_minus_monotonic_ns=1_700_000_000_000_000_000,
        buckets=buckets,
    )
    ended = max(record.ended_ns for record in records) if records else START_NS
    status = Status(Activity.ENDED, ended, len(records), ended)
    moved = tuple(move(record, job.clock_ms[at], job.drift_ppm[at]) for record in records)
    notes = tuple(note for owner, note in job.notes if owner == rank)
    return RankHistory(info, status, moved, notes)


def move(record: StepRecord, ahead_ms: float, drift_ppm: float) -> StepRecord:
    """Return a record as a clock that is ahead, and goes too fast, would have stamped it."""

    def shown(stamp: int) -> int:
        return stamp + round(ahead_ms * MS) + round((stamp - START_NS) * drift_ppm / 1e6)

    names = [
        "began_ns",
        "forward_began_ns",
        "forward_ended_ns",
        "backward_began_ns",
        "backward_ended_ns",
        "reduced_ns",
        "optimizer_began_ns",
        "optimizer_ended_ns",
    ]
    buckets = tuple(
        replace(
            bucket,
            ready_ns=shown(bucket.ready_ns),
            began_ns=shown(bucket.began_ns),
            ended_ns=shown(bucket.ended_ns),
        )
        for bucket in record.buckets
    )
    stamps = {name: shown(getattr(record, name)) for name in names}
    return replace(record, buckets=buckets, **stamps)


def make_run(job: Job, name: str = "simulated", state: RunState = RunState.FINISHED) -> Run:
    """Return a job as a report reads it."""
    info = RunInfo(name, ("train.py", "--lr", "0.1"), job.ranks, len(job.hosts), 1, 1.7e9, {})
    return Run(name, info, simulate(job), state)


def write_folder(job: Job, path: Path, file_bytes: int | None = None) -> Path:
    """Write a job as its recorder would have."""
    folder = RunFolder.create("train.py", path)
    versions = {"paceline": "0.1.0", "torch": "2.13.0", "python": "3.11"}
    command = ("train.py", "--lr", "0.1")
    folder.write_info(RunInfo(path.name, command, job.ranks, len(job.hosts), 1, 1.7e9, versions))
    for history in simulate(job):
        write_history(history, folder.events(history.info.rank), file_bytes)
    return path


def write_history(history: RankHistory, path: Path, file_bytes: int | None = None) -> None:
    """Write one rank's file."""
    size = {} if file_bytes is None else {"file_bytes": file_bytes}
    writer = EventWriter(path, replace(history.info, buckets=()), **size)
    writer.append_buckets(history.info.buckets)
    for record in history.steps:
        writer.append_step(record)
    for note in history.notes:
        writer.append_note(note)
    writer.set_status(history.status)
    writer.close()
