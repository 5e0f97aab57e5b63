"""Steps of all ranks, side by side on one clock: own time by phase, arrival, waiting, blame.

The heart of the analysis. After a synchronising step wall times are equal everywhere, so they
cannot tell a culprit from its victims. What can: each rank *arrives* at the reduction when its last
bucket is ready. From the last shared instant (the end of the reduction before) to its arrival a
rank does its own work and waits for nobody; from then on it waits for others, and for the
reduction.

Every nanosecond in which a rank waits is charged to those that have not arrived yet, in equal
parts. So blame is never negative, and all blame together is all time lost: nothing is lost twice,
nothing is forgotten. What a rank is blamed for is divided among its phases in proportion to how
much longer than the others it took in each.

Called by analysis.py. Must not know about HTML, nor about causes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.observe.records import RankHistory, StepRecord
from paceline.report.clocks import HostClock, Key, shift
from paceline.report.counts import spread_counts
from paceline.report.forward_waits import Forwards, awaited_ranks, forward_waits
from paceline.report.numbers import low_median
from paceline.report.phases import PHASES, Phase


@dataclass(frozen=True)
class RankStep:
    """One rank in one step; all stamps on the reference clock.

    Attributes:
        record: What it recorded.
        before: What it recorded of the step before.
        own_ns: Its own time since the last shared instant, by phase; adds up to its arrival.
        arrived_ns: When its last bucket was ready.
        late_ns: How much later it arrived than the (lower) median of the others; never negative.
        lost_ns: How long it waited for ranks that had not arrived, in forward too.
        exposed_ns: How long it waited although all had arrived: communication nothing hid.
        blame_ns: How long others waited for it, added up over them.
    """

    record: StepRecord
    before: StepRecord
    own_ns: Mapping[Phase, int]
    arrived_ns: int
    late_ns: int
    lost_ns: int
    exposed_ns: int
    blame_ns: float
    blame_by_phase_ns: Mapping[Phase, float]


@dataclass(frozen=True)
class JobStep:
    """One synchronised step, as far as several ranks have recorded it."""

    key: Key
    ranks: Mapping[int, RankStep]

    @property
    def number(self) -> int:
        """Counts the steps of its wrapper."""
        return self.key[1]

    @property
    def ended_ns(self) -> int:
        """When the first rank saw its end."""
        return min(each.record.reduced_ns for each in self.ranks.values())

    @property
    def duration_ns(self) -> int:
        """From reduction to reduction, where that takes longest."""
        return max(each.record.reduced_ns - each.before.reduced_ns for each in self.ranks.values())


Timeline = Mapping[Key, StepRecord]


def align(
    histories: Sequence[RankHistory], clocks: Sequence[HostClock]
) -> dict[int, dict[Key, StepRecord]]:
    """Return every rank's records on the reference clock, in the order in which they ended."""
    by_host = {clock.host: clock for clock in clocks}
    found = {}
    for history in histories:
        clock = by_host[history.info.host]
        ordered = sorted(history.steps, key=lambda record: record.reduced_ns)
        records = spread_counts(ordered, history.info.threads)
        found[history.info.rank] = {
            (record.wrapper, record.step): shift(record, clock.ahead_ns(record.step))
            for record in records
        }
    return found


def compare_ranks(timelines: Mapping[int, Timeline]) -> tuple[JobStep, ...]:
    """Put the ranks side by side, step by step. A rank's first record has nothing before it."""
    members: dict[Key, list[_Member]] = {}
    for rank, timeline in timelines.items():
        records = list(timeline.values())
        for before, record in itertools.pairwise(records):
            key = (record.wrapper, record.step)
            if record.is_joined:  # it has no inputs any more, and only answers
                continue
            members.setdefault(key, []).append((rank, before, record))
    works = {key: _Work(_in_step(ranks)) for key, ranks in members.items()}
    awaited = awaited_ranks([work.forwards for work in works.values()])
    steps = [_step(key, work, awaited) for key, work in works.items()]
    return tuple(sorted(steps, key=lambda step: step.ended_ns))


_Member = tuple[int, StepRecord, StepRecord]


def _in_step(members: list[_Member]) -> list[_Member]:
    """Keep the ranks that share the reduction before: one that joins has none in common."""
    befores = [(before.wrapper, before.step) for _, before, _ in members]
    usual = max(befores, key=lambda key: (befores.count(key), key))
    return [each for each, key in zip(members, befores, strict=True) if key == usual]


class _Work:
    """One step before anybody is blamed: each rank's own time, as its stamps have it."""

    def __init__(self, members: list[_Member]) -> None:
        self.members = members
        self.shared_ns = min(before.reduced_ns for _, before, _ in members)
        self.own = {
            rank: _own_time(self.shared_ns, before, record) for rank, before, record in members
        }
        began = {rank: self._at(rank, Phase.INPUT) for rank in self.own}
        ended = {rank: began[rank] + own[Phase.FORWARD] for rank, own in self.own.items()}
        self.forwards = Forwards(began, ended)
        self.arrived = {rank: self._at(rank, PHASES[-1]) for rank in self.own}

    def _at(self, rank: int, last: Phase) -> int:
        until = PHASES[: PHASES.index(last) + 1]
        return self.shared_ns + sum(self.own[rank][phase] for phase in until)


def _step(key: Key, work: _Work, awaited: frozenset[int]) -> JobStep:
    """Find out who waited for whom: in the forward, if ranks wait there, and for the reduction."""
    arrived = work.arrived
    last_ns = max(arrived.values())
    waited = {rank: max(0, record.reduced_ns - arrived[rank]) for rank, _, record in work.members}
    lost = {rank: min(waited[rank], last_ns - arrived[rank]) for rank in arrived}
    blame = share_blame(arrived, lost)
    in_forward = forward_waits(work.forwards, awaited)
    if any(in_forward.values()):
        for rank, more in share_blame(work.forwards.began_ns, in_forward).items():
            blame[rank] += more
    for rank, wait in in_forward.items():
        work.own[rank][Phase.FORWARD] -= wait
    ranks = {}
    for rank, before, record in work.members:
        others = [each for each in arrived if each != rank]
        ranks[rank] = RankStep(
            record=record,
            before=before,
            own_ns=work.own[rank],
            arrived_ns=arrived[rank],
            late_ns=max(_late_ns(rank, arrived), _late_ns(rank, work.forwards.began_ns))
            if any(in_forward.values())
            else _late_ns(rank, arrived),
            lost_ns=lost[rank] + in_forward[rank],
            exposed_ns=waited[rank] - lost[rank],
            blame_ns=blame[rank],
            blame_by_phase_ns=_divide(
                blame[rank], work.own[rank], [work.own[each] for each in others]
            ),
        )
    return JobStep(key, ranks)


def _late_ns(rank: int, at: Mapping[int, int]) -> int:
    others = [stamp for other, stamp in at.items() if other != rank]
    return max(0, at[rank] - low_median(others)) if others else 0


def _own_time(shared_ns: int, before: StepRecord, record: StepRecord) -> dict[Phase, int]:
    """Cut the way from the shared instant to the arrival into phases; none is negative."""
    ready = (bucket.ready_ns for bucket in record.buckets)
    ends = {
        Phase.REDUCTION: before.reduced_ns,
        Phase.OPTIMIZER: record.began_ns,
        Phase.INPUT: record.forward_began_ns,
        Phase.FORWARD: record.forward_ended_ns,
        Phase.LOSS: record.backward_began_ns,
        Phase.BACKWARD: max(record.backward_ended_ns, *ready, 0),
    }
    own = {}
    at = shared_ns
    for phase in PHASES:
        own[phase] = max(0, ends[phase] - at)
        at += own[phase]
    return own


def share_blame(arrived: Mapping[int, int], lost: Mapping[int, int]) -> dict[int, float]:
    """Charge each moment of waiting to those who are not there yet, in equal parts."""
    order = sorted(arrived, key=lambda rank: arrived[rank])
    blame = dict.fromkeys(arrived, 0.0)
    for there, (early, late) in enumerate(itertools.pairwise(order), 1):
        missing = order[there:]
        waited = (arrived[late] - arrived[early]) * there / len(missing)
        for rank in missing:
            blame[rank] += waited
    charged, total = sum(blame.values()), sum(lost.values())
    # Less than what the arrivals say is lost only if stamps contradict each other.
    scale = total / charged if charged else 0.0
    return {rank: value * scale for rank, value in blame.items()}


def _divide(
    blame_ns: float, own: Mapping[Phase, int], others: Sequence[Mapping[Phase, int]]
) -> dict[Phase, float]:
    """Divide blame among phases by how much longer than the others this rank took in each."""
    if not blame_ns:
        return dict.fromkeys(PHASES, 0.0)
    excess = {
        phase: max(0, own[phase] - low_median([other[phase] for other in others]))
        for phase in PHASES
    }
    weights = excess if any(excess.values()) else own
    total = sum(weights.values())
    return {phase: blame_ns * weights[phase] / total for phase in PHASES}
