"""All that a report says, as plain data: computed once, shown as a page, as JSON, or compared.

Called by ``cli/report.py``. Every number on the page is from here. Must not know about HTML.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.membership import PHASES as CHANGE_PHASES
from paceline.observe.records import RankHistory
from paceline.report.advice import Advice, Situation, advise
from paceline.report.buckets import BucketMeter, BucketSummary, Overlap
from paceline.report.causes import Cause, Diagnosis, diagnose
from paceline.report.clocks import HostClock, compare_clocks
from paceline.report.numbers import median, percentile, share
from paceline.report.phases import NS_PER_S, PHASES, Phase, to_ms
from paceline.report.run import Run, RunState
from paceline.report.steps import JobStep, align, compare_ranks
from paceline.report.stragglers import Stall, Straggler, find_stalls, find_stragglers


@dataclass(frozen=True)
class StepTimes:
    """How long steps take, from reduction to reduction, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    longest_step: int


@dataclass(frozen=True)
class RankTimes:
    """Where one rank's time goes in the mean step, in ms. All of them add up to the step.

    Attributes:
        own: Its own time, by phase.
        lost: Waiting for ranks that had not arrived.
        exposed: Waiting for communication although all had arrived.
    """

    rank: int
    host: str
    pid: int
    threads: int
    cores: int
    core_list: str
    steps: int
    own: dict[Phase, float]
    lost: float
    exposed: float
    samples_per_s: float
    run_delay: float


@dataclass(frozen=True)
class Event:
    """Something that a rank noted. ``at_s`` counts from the first record of the run."""

    rank: int
    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class ReportedChange:
    """A change of who takes part in an elastic job. ``at_s`` counts as in :class:`Event`."""

    at_s: float
    epoch: int
    world: int
    step: int
    why: str
    took_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True)
class Suspect:
    """One rank's cost to the others, and the likely cause."""

    straggler: Straggler
    diagnosis: Diagnosis


@dataclass(frozen=True)
class Analysis:
    """One run, understood. Times are milliseconds, shares 0 to 1."""

    name: str
    command: tuple[str, ...]
    state: RunState
    failure: str
    began_s: float
    duration_s: float
    world: int
    hosts: tuple[str, ...]
    transport: str
    transport_reason: str
    versions: dict[str, str]
    steps: int
    first_step: int
    last_step: int
    skipped_steps: int
    times: StepTimes
    ranks: tuple[RankTimes, ...]
    samples_per_s: float
    first_loss: float
    last_loss: float
    suspects: tuple[Suspect, ...]
    stalls: tuple[Stall, ...]
    lost_share: float
    overlap: Overlap
    buckets: tuple[BucketSummary, ...]
    advice: tuple[Advice, ...]
    clocks: tuple[HostClock, ...]
    events: tuple[Event, ...]
    membership: tuple[ReportedChange, ...]
    problems: tuple[str, ...]

    @property
    def culprit(self) -> Suspect | None:
        """The rank that costs the others most, if that is worth mentioning."""
        return next((each for each in self.suspects if each.straggler.is_significant), None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; what is no number there is null."""
        found: dict[str, Any] = plain(self)
        return found


@dataclass(frozen=True)
class Measured:
    """An analysis with the steps that it was made of."""

    analysis: Analysis
    steps: tuple[JobStep, ...]


def analyse(run: Run) -> Measured:
    """Compute everything that a report says of a run."""
    clocks = compare_clocks(run.histories)
    steps = compare_ranks(align(run.histories, clocks))
    meter = BucketMeter()
    for step in _with_final_buckets(steps, run.histories):
        meter.add(step)
    infos = [info for history in run.histories[:1] for info in history.info.buckets]
    times = _step_times(steps)
    overlap, buckets = meter.overlap(), meter.summaries(infos)
    first = run.histories[0].info
    numbers = [step.number for step in steps]
    ranks = tuple(_rank_times(history, steps) for history in run.histories)
    losses = _losses(run.histories)
    analysis = Analysis(
        name=run.name,
        command=run.info.command if run.info else (),
        state=run.state,
        failure=run.failure,
        began_s=_began_s(run),
        duration_s=_duration_s(steps),
        world=run.info.world if run.info else max(h.info.world for h in run.histories),
        hosts=tuple(clock.host for clock in clocks),
        transport=first.transport,
        transport_reason=first.transport_reason,
        versions=run.info.versions if run.info else {},
        steps=len(steps),
        first_step=min(numbers, default=0),
        last_step=max(numbers, default=0),
        skipped_steps=_skipped(run.histories),
        times=times,
        ranks=ranks,
        samples_per_s=sum(rank.samples_per_s for rank in ranks),
        first_loss=losses[0],
        last_loss=losses[-1],
        suspects=_suspects(steps, run.histories),
        stalls=find_stalls(steps),
        lost_share=_lost_share(steps),
        overlap=overlap,
        buckets=buckets,
        advice=_advice(buckets, overlap, times, run.histories),
        clocks=clocks,
        events=_events(run.histories),
        membership=_membership(run),
        problems=run.problems,
    )
    return Measured(analysis, steps)


def _with_final_buckets(
    steps: Sequence[JobStep], histories: Sequence[RankHistory]
) -> Sequence[JobStep]:
    """Leave out steps from before buckets were cut anew: they had other buckets."""
    final: dict[int, int] = {}
    for info in (info for history in histories for info in history.info.buckets):
        final[info.wrapper] = max(final.get(info.wrapper, 0), info.first_step)
    return [step for step in steps if step.number >= final.get(step.key[0], 0)] or steps


def _step_times(steps: Sequence[JobStep]) -> StepTimes:
    durations = [step.duration_ns for step in steps]
    if not durations:
        return StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    longest = max(steps, key=lambda step: step.duration_ns)
    p50, p90, p99 = (to_ms(percentile(durations, percent)) for percent in (50, 90, 99))
    mean = to_ms(sum(durations) / len(durations))
    return StepTimes(mean, p50, p90, p99, to_ms(longest.duration_ns), longest.number)


def _rank_times(history: RankHistory, steps: Sequence[JobStep]) -> RankTimes:
    info = history.info
    mine = [step.ranks[info.rank] for step in steps if info.rank in step.ranks]
    count = max(1, len(mine))
    took_ns = sum(each.record.reduced_ns - each.before.reduced_ns for each in mine)
    samples = sum(each.record.samples for each in mine)
    return RankTimes(
        rank=info.rank,
        host=info.host,
        pid=info.pid,
        threads=info.threads,
        cores=info.cores,
        core_list=info.core_list,
        steps=len(mine),
        own={phase: to_ms(sum(each.own_ns[phase] for each in mine) / count) for phase in PHASES},
        lost=to_ms(sum(each.lost_ns for each in mine) / count),
        exposed=to_ms(sum(each.exposed_ns for each in mine) / count),
        samples_per_s=round(samples / (took_ns / NS_PER_S), 3) if took_ns > 0 else 0.0,
        run_delay=to_ms(sum(each.record.run_delay_ns for each in mine) / count),
    )


def _suspects(steps: Sequence[JobStep], histories: Sequence[RankHistory]) -> tuple[Suspect, ...]:
    nobody = Diagnosis(Cause.NONE, "", "")
    return tuple(
        Suspect(each, diagnose(each, steps, histories) if each.lost_ms else nobody)
        for each in find_stragglers(steps)
    )


def _lost_share(steps: Sequence[JobStep]) -> float:
    lost = sum(each.lost_ns for step in steps for each in step.ranks.values())
    return share(lost, sum(step.duration_ns * len(step.ranks) for step in steps))


def _advice(
    buckets: tuple[BucketSummary, ...],
    overlap: Overlap,
    times: StepTimes,
    histories: Sequence[RankHistory],
) -> tuple[Advice, ...]:
    is_across = len({history.info.host for history in histories}) > 1
    transport = histories[0].info.transport
    wrappers = sorted({bucket.wrapper for bucket in buckets})
    found: list[Advice] = []
    for wrapper in wrappers:
        mine = tuple(bucket for bucket in buckets if bucket.wrapper == wrapper)
        found += advise(Situation(mine, overlap, times.p50, transport, is_across))
    return tuple(sorted(found, key=lambda advice: -advice.gain_ms))


def _skipped(histories: Sequence[RankHistory]) -> int:
    return max(sum(record.is_skipped for record in history.steps) for history in histories)


def _losses(histories: Sequence[RankHistory]) -> tuple[float, float]:
    """The first and the last, each the median of a few: single ones are noisy."""
    given = [record.loss for record in histories[0].steps if not math.isnan(record.loss)]
    if not given:
        return math.nan, math.nan
    few = max(1, min(20, len(given) // 10))
    return median(given[:few]), median(given[-few:])


def _membership(run: Run) -> tuple[ReportedChange, ...]:
    start_s = _start_s(run.histories)
    return tuple(
        ReportedChange(
            at_s=round(change.at_s - start_s, 3),
            epoch=change.epoch,
            world=change.world,
            step=change.step,
            why=change.why,
            took_s=round(change.took_s, 3),
            phases_s=dict(zip(CHANGE_PHASES, change.phases_s, strict=True)),
        )
        for change in run.membership
    )


def _start_s(histories: Sequence[RankHistory]) -> float:
    return min((_wall_s(history, _first_ns(history)) for history in histories), default=0.0)


def _events(histories: Sequence[RankHistory]) -> tuple[Event, ...]:
    start_s = _start_s(histories)
    found = [
        Event(
            history.info.rank,
            round(_wall_s(history, note.at_ns) - start_s, 3),
            note.kind,
            note.text,
        )
        for history in histories
        for note in history.notes
    ]
    return tuple(sorted(found, key=lambda event: (event.at_s, event.rank)))


def _first_ns(history: RankHistory) -> int:
    stamps = [record.began_ns or record.forward_began_ns for record in history.steps[:1]]
    stamps += [note.at_ns for note in history.notes[:1]]
    return min(stamps, default=history.status.beat_ns)


def _wall_s(history: RankHistory, stamp_ns: int) -> float:
    return (stamp_ns + history.info.wall_minus_monotonic_ns) / NS_PER_S


def _began_s(run: Run) -> float:
    if run.info:
        return run.info.began_s
    return min(_wall_s(history, _first_ns(history)) for history in run.histories)


def _duration_s(steps: Sequence[JobStep]) -> float:
    if not steps:
        return 0.0
    first = min(each.before.reduced_ns for each in steps[0].ranks.values())
    return round((steps[-1].ended_ns - first) / NS_PER_S, 3)


def plain(value: Any) -> Any:
    """Turn dataclasses and enums into what JSON has; floats that it has not into None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
