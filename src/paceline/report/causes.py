"""The likely cause of a rank's lateness, from what the kernel counted beside the stamps.

A late rank had no core, computed more than the others, or did neither (it slept, or waited for a
disk, a lock, a data loader). CPU time, run delay and CPU steal tell these apart. Called by
analysis.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.observe.records import RankHistory, StepRecord
from paceline.report.numbers import median
from paceline.report.phases import NS_PER_MS, Phase
from paceline.report.steps import JobStep
from paceline.report.stragglers import Pattern, Straggler, costly_steps, worst_phase

# What a page from disk costs, at least: an SSD's read.
FAULT_NS = 100_000
# What it may cost where nothing else explains the lateness: a busy disk, or one in the network.
SLOW_FAULT_NS = 1_000_000
# The share of the lateness that a count must explain to be called its cause.
EXPLAINS = 0.4
# In so many of the worst steps the counts of a chronic straggler are looked at.
WORST_STEPS = 200


class Cause(enum.Enum):
    """Why a rank is late."""

    NONE = "none"
    NO_CORE = "no core"
    THROTTLED = "throttled"
    STOLEN = "CPU steal"
    TOO_MANY_THREADS = "more threads than cores"
    PAGING = "paging"
    DATA_LOADER = "data loader"
    BETWEEN_STEPS = "between two steps"
    MORE_WORK = "more work"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """A cause, in words, with the numbers that speak for it."""

    cause: Cause
    text: str
    evidence: str


@dataclass(frozen=True)
class _Excess:
    """What a rank had more of than the others, in the mean step in which it was late.

    Cores are stolen from all ranks of a host alike, so for ``stolen_ns`` its own other steps count,
    too. ``own_delay_ns`` is its own run delay, not what it had more of.
    """

    late_ns: float
    cpu_ns: float
    run_delay_ns: float
    own_delay_ns: float
    major_faults: float
    stolen_ns: float
    samples_ratio: float
    has_counts: bool

    def explains(self, ns: float) -> bool:
        return ns >= EXPLAINS * self.late_ns


def diagnose(
    straggler: Straggler, steps: Sequence[JobStep], histories: Sequence[RankHistory]
) -> Diagnosis:
    """Say why a rank makes the others wait."""
    excess = _excess(straggler, steps)
    if excess is None:
        return Diagnosis(Cause.NONE, "", "")
    host = _HostLoad.of(straggler.rank, histories)
    if excess.explains(excess.major_faults * FAULT_NS) and excess.major_faults >= 1:
        return _paging(excess)
    if excess.explains(excess.stolen_ns):
        return _stolen(excess)
    if excess.explains(excess.run_delay_ns):
        return _no_core(excess, host)
    if straggler.phase is Phase.INPUT:
        is_usual = straggler.pattern is Pattern.CHRONIC
        return _data_loader(excess) if is_usual else _between_steps(excess)
    if not excess.has_counts:
        return Diagnosis(Cause.UNKNOWN, "the cause is not known", "no CPU times were recorded")
    if excess.explains(excess.cpu_ns):
        return _more_work(excess)
    if excess.explains(excess.major_faults * SLOW_FAULT_NS) and excess.major_faults >= 1:
        return _paging(excess)
    if excess.own_delay_ns >= excess.late_ns:
        return _all_wait(excess)
    return Diagnosis(
        Cause.BLOCKED,
        "it neither computes nor waits for a core: it sleeps, or waits for a disk, a lock or "
        "the network",
        f"{_ms(excess.late_ns)} late, {_ms(max(0, excess.cpu_ns))} more CPU time, "
        f"{_ms(max(0, excess.run_delay_ns))} more waiting for a core",
    )


def _late_steps(straggler: Straggler, steps: Sequence[JobStep]) -> list[JobStep]:
    """Those that matter: many small delays, which all ranks have, would dilute a few long ones."""
    blames = [step.ranks[straggler.rank].blame_ns for step in steps]
    if straggler.pattern is not Pattern.CHRONIC:
        return [steps[at] for at in costly_steps(blames)]
    order = sorted(range(len(steps)), key=lambda at: -blames[at])
    return [steps[at] for at in order[:WORST_STEPS] if blames[at] > 0]


def _excess(straggler: Straggler, steps: Sequence[JobStep]) -> _Excess | None:
    rank = straggler.rank
    steps = [step for step in steps if rank in step.ranks]
    late = _late_steps(straggler, steps)
    if not late:
        return None

    def mean(value: Callable[[StepRecord], float]) -> float:
        return _more_than_others(rank, late, value)

    counted = [_counting_record(rank, step) for step in late]
    samples = median([record.samples for record in counted])
    others = median(
        [record.samples for step in late for record in _records_of_others(rank, step).values()]
    )
    return _Excess(
        late_ns=sum(step.ranks[rank].late_ns for step in late) / len(late),
        cpu_ns=mean(lambda record: record.cpu_ns),
        run_delay_ns=mean(lambda record: record.run_delay_ns),
        own_delay_ns=sum(record.run_delay_ns for record in counted) / len(counted),
        major_faults=mean(lambda record: record.major_faults),
        stolen_ns=max(
            mean(lambda record: record.stolen_ns),
            _more_stolen_than_usual(counted, [step.ranks[rank].record for step in steps]),
        ),
        samples_ratio=samples / others if others else 1.0,
        has_counts=any(record.cpu_ns for record in counted),
    )


def _more_stolen_than_usual(late: Sequence[StepRecord], records: Sequence[StepRecord]) -> float:
    """In the mean of some steps: where a host loses a part of its cores all the time, 0."""
    usual = median([record.stolen_ns / max(1, record.duration_ns) for record in records])
    return sum(record.stolen_ns - usual * record.duration_ns for record in late) / len(late)


def _counting_record(rank: int, step: JobStep) -> StepRecord:
    """The record whose counters hold the delay: an optimizer belongs to the step before."""
    each = step.ranks[rank]
    is_before = worst_phase(each) in (Phase.REDUCTION, Phase.OPTIMIZER)
    return each.before if is_before else each.record


def _records_of_others(rank: int, step: JobStep) -> dict[int, StepRecord]:
    is_before = _counting_record(rank, step) is step.ranks[rank].before
    return {
        other: each.before if is_before else each.record
        for other, each in step.ranks.items()
        if other != rank
    }


def _more_than_others(
    rank: int, late: Sequence[JobStep], value: Callable[[StepRecord], float]
) -> float:
    """Compare means over all late steps: a recorder may count several steps' delay in one."""
    own = sum(value(_counting_record(rank, step)) for step in late) / len(late)
    others: dict[int, list[float]] = {}
    for step in late:
        for other, record in _records_of_others(rank, step).items():
            others.setdefault(other, []).append(value(record))
    return own - median([sum(values) / len(values) for values in others.values()])


@dataclass(frozen=True)
class _HostLoad:
    """Threads and cores of the host on which a rank runs."""

    ranks: int
    threads: int
    cores: int
    is_throttled: bool

    @classmethod
    def of(cls, rank: int, histories: Sequence[RankHistory]) -> _HostLoad:
        mine = next(history for history in histories if history.info.rank == rank)
        here = [history.info for history in histories if history.info.host == mine.info.host]
        cores = max(info.cores for info in here)
        # Pinned to parts of the host:
        if any(info.cores < cores or info.core_list != mine.info.core_list for info in here):
            pinned = mine.info.core_list or "unknown"
            here = [info for info in here if info.core_list == pinned] or [mine.info]
            cores = mine.info.cores
        throttled = any("throttl" in note.kind for note in mine.notes)
        return cls(len(here), sum(info.threads for info in here), cores, throttled)


def _no_core(excess: _Excess, host: _HostLoad) -> Diagnosis:
    evidence = (
        f"{_ms(excess.run_delay_ns)} more waiting for a core than the others, "
        f"of {_ms(excess.late_ns)} late"
    )
    if host.is_throttled:
        text = "its cgroup is out of CPU quota: raise the limit (cpu.max), or use fewer threads"
        return Diagnosis(Cause.THROTTLED, text, evidence)
    if 0 < host.cores < host.threads:
        remedy = "lower OMP_NUM_THREADS" if host.threads > host.ranks else "use fewer ranks"
        cores = "core" if host.cores == 1 else "cores"
        text = (
            f"its threads wait for a core: {host.threads} threads on {host.cores} {cores}; {remedy}"
        )
        return Diagnosis(Cause.TOO_MANY_THREADS, text, evidence)
    text = "its threads wait for a core: another process uses the CPU, or a cgroup limits it"
    return Diagnosis(Cause.NO_CORE, text, evidence)


def _all_wait(excess: _Excess) -> Diagnosis:
    """Run delays of several steps come together, so which of them had how much is lost."""
    text = (
        "the cause is not known: all ranks wait for cores, which may or may not be why this one is "
        "late; leave the host to this job, then record again"
    )
    evidence = (
        f"{_ms(excess.own_delay_ns)} waiting for a core, {_ms(max(0, excess.run_delay_ns))} more "
        f"than the others, {_ms(excess.late_ns)} late"
    )
    return Diagnosis(Cause.UNKNOWN, text, evidence)


def _stolen(excess: _Excess) -> Diagnosis:
    return Diagnosis(
        Cause.STOLEN,
        "the hypervisor gives its cores to other machines: use a dedicated or larger instance, or "
        "another host",
        f"{_ms(excess.stolen_ns)} more CPU steal than usual on each core, "
        f"of {_ms(excess.late_ns)} late",
    )


def _paging(excess: _Excess) -> Diagnosis:
    return Diagnosis(
        Cause.PAGING,
        "pages come from disk: the host swaps, or a mapped file is read for the first time",
        f"{excess.major_faults:.0f} more major faults a step than the others",
    )


def _data_loader(excess: _Excess) -> Diagnosis:
    if excess.explains(excess.cpu_ns):
        text = "its input takes CPU time in the training process: use DataLoader(num_workers=...)"
    else:
        text = "it waits for its data loader: more workers, or faster storage"
    evidence = f"{_ms(excess.late_ns)} late, {_ms(max(0, excess.cpu_ns))} more CPU time"
    return Diagnosis(Cause.DATA_LOADER, text, evidence)


def _between_steps(excess: _Excess) -> Diagnosis:
    """What happens in few steps: a loader has to be quick in all of them."""
    text = (
        "something that only now and then comes between two steps: a checkpoint, an evaluation or "
        "logging on this rank alone, or a data loader whose workers start"
    )
    evidence = f"{_ms(excess.late_ns)} late, {_ms(max(0, excess.cpu_ns))} more CPU time"
    return Diagnosis(Cause.BETWEEN_STEPS, text, evidence)


def _more_work(excess: _Excess) -> Diagnosis:
    evidence = f"{_ms(excess.cpu_ns)} more CPU time than the others, {_ms(excess.late_ns)} late"
    if excess.samples_ratio > 1.05:
        text = f"it has {excess.samples_ratio:.2g} times the samples of the others"
    else:
        text = "it computes more than the others: longer inputs, extra work, or a slower core"
    return Diagnosis(Cause.MORE_WORK, text, evidence)


def _ms(ns: float) -> str:
    ms = ns / NS_PER_MS
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
