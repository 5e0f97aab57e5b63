"""Buckets: when each is ready, how long its reduction takes, and how much of that nothing hides.

A reduction cannot begin before the last rank has started it; what an early rank waits until then
is lost to that rank, not to communication (steps.py). So communication is from the last start to
the end. It is *exposed* as far as it lies after the backward of all ranks: before that, somebody
still computes, and the step would not be shorter without it. Called by analysis.py,
compare.py and trace.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.records import BucketInfo, BucketTimes
from paceline.report.numbers import median, share
from paceline.report.phases import NS_PER_MS, to_ms
from paceline.report.steps import JobStep, RankStep


@dataclass(frozen=True)
class BucketSummary:
    """One bucket over all steps and ranks; times are medians, in ms since backward began.

    Attributes:
        reduce_ms: From the start on the last rank to the end.
        exposed_ms: The part of the reduction after all backwards that no other bucket filled; a
            mean, so that all buckets add up to the exposed communication of a step.
        waits_ms: Between ready and start: for the order of buckets.
        last_rank: The rank on which it is ready last most often; -1 if there is only one.
        is_ready_at_end: It is complete only when the whole backward is.
    """

    wrapper: int
    index: int
    bytes: int
    parameters: tuple[str, ...]
    ready_ms: float
    began_ms: float
    ended_ms: float
    reduce_ms: float
    exposed_ms: float
    waits_ms: float
    last_rank: int
    last_share: float
    is_ready_at_end: bool

    @property
    def gb_per_s(self) -> float:
        """Bytes of gradients by the time of the reduction."""
        return self.bytes / (self.reduce_ms / 1e3) / 1e9 if self.reduce_ms else 0.0


@dataclass(frozen=True)
class Overlap:
    """How much communication backward hides, over all ranks and steps.

    Attributes:
        hidden_share: 0 to 1; 1 if there was none.
        communication_ms: In the mean step of a rank.
        exposed_ms: The part of it after backward.
        backward_ms: The median backward.
    """

    hidden_share: float
    communication_ms: float
    exposed_ms: float
    backward_ms: float


@dataclass(frozen=True)
class BucketReduction:
    """One bucket's communication on one rank: from the last rank's start to the end here."""

    times: BucketTimes
    from_ns: int
    exposed_ns: int

    @property
    def busy_ns(self) -> int:
        """How long it takes."""
        return max(0, self.times.ended_ns - self.from_ns)


def reductions_of(step: JobStep, rank: int) -> list[BucketReduction]:
    """Return the reductions of a step as one rank sees them, in the order in which they end."""
    starts = _last_starts(step)
    done_ns = max(each.arrived_ns for each in step.ranks.values())
    found = []
    for bucket in sorted(step.ranks[rank].record.buckets, key=lambda times: times.ended_ns):
        if not bucket.ended_ns:
            continue
        from_ns = min(starts[bucket.index], bucket.ended_ns)
        exposed = max(0, bucket.ended_ns - max(from_ns, done_ns))
        done_ns = max(done_ns, bucket.ended_ns)
        found.append(BucketReduction(bucket, from_ns, exposed))
    return found


def _last_starts(step: JobStep) -> dict[int, int]:
    starts: dict[int, int] = {}
    for each in step.ranks.values():
        for bucket in each.record.buckets:
            began = bucket.began_ns or bucket.ready_ns
            starts[bucket.index] = max(starts.get(bucket.index, 0), began)
    return starts


def _busy_ns(reductions: Sequence[BucketReduction]) -> int:
    """The length of the union of all reductions."""
    total = until = 0
    for each in sorted(reductions, key=lambda reduction: reduction.from_ns):
        total += max(0, each.times.ended_ns - max(each.from_ns, until))
        until = max(until, each.times.ended_ns)
    return total


class BucketMeter:
    """Collects what a report says of buckets, step by step."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[BucketReduction]] = {}
        self._offsets: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._last: dict[tuple[int, int], list[int]] = {}
        self._busy_ns = 0
        self._exposed_ns = 0
        self._backward_ns: list[int] = []
        self._rank_steps: dict[int, int] = {}

    def add(self, step: JobStep) -> None:
        """Count one step on all of its ranks."""
        wrapper = step.key[0]
        for rank, each in step.ranks.items():
            reductions = reductions_of(step, rank)
            busy = _busy_ns(reductions)
            self._busy_ns += busy
            self._exposed_ns += sum(reduction.exposed_ns for reduction in reductions)
            self._backward_ns.append(each.record.backward_ended_ns - each.record.backward_began_ns)
            self._rank_steps[wrapper] = self._rank_steps.get(wrapper, 0) + 1
            for reduction in reductions:
                self._add_bucket((wrapper, reduction.times.index), each, reduction)
        for index, rank in _last_ranks(step).items():
            self._last.setdefault((wrapper, index), []).append(rank)

    def _add_bucket(self, key: tuple[int, int], each: RankStep, reduction: BucketReduction) -> None:
        times, record = reduction.times, each.record
        began = times.began_ns or times.ready_ns
        self._rows.setdefault(key, []).append(reduction)
        self._offsets.setdefault(key, []).append(
            (
                times.ready_ns - record.backward_began_ns,
                began - record.backward_began_ns,
                times.ended_ns - record.backward_began_ns,
                record.backward_ended_ns - times.ready_ns,
            )
        )

    def overlap(self) -> Overlap:
        """Return communication, hidden and exposed."""
        steps = max(1, sum(self._rank_steps.values()))
        hidden = share(self._busy_ns - self._exposed_ns, self._busy_ns) if self._busy_ns else 1.0
        return Overlap(
            hidden_share=hidden,
            communication_ms=to_ms(self._busy_ns / steps),
            exposed_ms=to_ms(self._exposed_ns / steps),
            backward_ms=to_ms(median(self._backward_ns)),
        )

    def summaries(self, infos: Sequence[BucketInfo]) -> tuple[BucketSummary, ...]:
        """Return one row for every bucket, in plan order."""
        names: dict[tuple[int, int], BucketInfo] = {}
        for info in sorted(infos, key=lambda each: each.first_step):
            names[(info.wrapper, info.index)] = info
        return tuple(self._summary(key, names.get(key)) for key in sorted(self._rows))

    def _summary(self, key: tuple[int, int], info: BucketInfo | None) -> BucketSummary:
        rows, offsets, last = self._rows[key], self._offsets[key], self._last.get(key, [])
        ready, began, ended, to_end = (median(column) for column in zip(*offsets, strict=True))
        most = max(set(last), key=lambda rank: (last.count(rank), -rank)) if last else -1
        exposed = sum(row.exposed_ns for row in rows) / self._rank_steps[key[0]]
        return BucketSummary(
            wrapper=key[0],
            index=key[1],
            bytes=rows[-1].times.bytes,
            parameters=info.parameters if info else (),
            ready_ms=to_ms(ready),
            began_ms=to_ms(began),
            ended_ms=to_ms(ended),
            reduce_ms=to_ms(median([row.busy_ns for row in rows])),
            exposed_ms=to_ms(exposed),
            waits_ms=to_ms(max(0.0, began - ready)),
            last_rank=most,
            last_share=share(last.count(most), len(last)),
            is_ready_at_end=to_end <= 0.02 * max(ready + to_end, NS_PER_MS / 100),
        )


def _last_ranks(step: JobStep) -> dict[int, int]:
    """The rank on which each bucket was ready last; of no interest with one rank."""
    last: dict[int, tuple[int, int]] = {}
    if len(step.ranks) < 2:
        return {}
    for rank, each in step.ranks.items():
        for bucket in each.record.buckets:
            last[bucket.index] = max(last.get(bucket.index, (0, -1)), (bucket.ready_ns, rank))
    return {index: rank for index, (_, rank) in last.items()}
