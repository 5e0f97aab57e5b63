"""Put the stamps of all hosts on one clock.

Ranks of one host share CLOCK_MONOTONIC; two hosts do not. Their reductions tell the difference:

- No reduction ends, on any rank, before its bucket was ready on every rank. That bounds the
  difference from both sides, as a round trip does for NTP. These bounds are certain.
- Ranks see the end of a reduction at nearly the same time. The median over many reductions is the
  estimate; the bounds correct it where they must.

Clocks drift apart (20 ppm are 72 ms in an hour), so the difference is estimated anew in every
window of steps. Called by steps.py; must not know what the stamps are used for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.records import BucketTimes, RankHistory, StepRecord
from paceline.report.numbers import median, percentile

WINDOW_STEPS = 100
"""Two clocks that drift apart by 50 ppm differ by 1 ms after 20 s, so after some hundred steps."""

Key = tuple[int, int]
"""(wrapper, step): names one synchronised step on all ranks."""


@dataclass(frozen=True)
class ClockWindow:
    """How far one host's clock is ahead of the reference, during some steps."""

    first_step: int
    ahead_ns: int
    lowest_ns: int
    highest_ns: int
    spread_ns: int
    """Half of the range that holds 90 % of what single reductions say."""


@dataclass(frozen=True)
class HostClock:
    """One host's clock, compared with that of the reference host (of the lowest rank)."""

    host: str
    windows: tuple[ClockWindow, ...]

    @property
    def uncertainty_ns(self) -> int:
        """The typical error of a stamp, in the worst window; 0 for the reference itself."""
        return max((window.spread_ns for window in self.windows), default=0)

    @property
    def bound_ns(self) -> int:
        """The largest possible error, in the worst window."""
        errors = [
            max(window.highest_ns - window.ahead_ns, window.ahead_ns - window.lowest_ns)
            for window in self.windows
        ]
        return max(errors, default=0)

    def ahead_ns(self, step: int) -> int:
        """How far the clock is ahead at a step."""
        found = 0
        for window in self.windows:
            if window.first_step > step and found:
                break
            found = window.ahead_ns
        return found


Records = Mapping[Key, StepRecord]


def compare_clocks(histories: Sequence[RankHistory]) -> tuple[HostClock, ...]:
    """Compare every host's clock with that of the lowest rank's host."""
    by_host: dict[str, list[Records]] = {}
    for history in sorted(histories, key=lambda each: each.info.rank):
        records = {(record.wrapper, record.step): record for record in history.steps}
        by_host.setdefault(history.info.host, []).append(records)
    if not by_host:
        return ()
    reference, *others = by_host
    return (
        HostClock(reference, ()),
        *(HostClock(host, _windows(by_host[reference], by_host[host])) for host in others),
    )


def _windows(reference: list[Records], other: list[Records]) -> tuple[ClockWindow, ...]:
    shared = set.intersection(*(set(records) for records in (*reference, *other)))
    keys = sorted(shared, key=lambda key: reference[0][key].reduced_ns)
    groups = [keys[at : at + WINDOW_STEPS] for at in range(0, len(keys), WINDOW_STEPS)]
    return tuple(window for group in groups if (window := _window(reference, other, group)))


def _window(reference: list[Records], other: list[Records], keys: list[Key]) -> ClockWindow | None:
    ends: list[int] = []
    lowest, highest = [], []
    for key in keys:
        ours = [records[key].buckets for records in reference]
        theirs = [records[key].buckets for records in other]
        for here, there in zip(_reductions(ours), _reductions(theirs), strict=False):
            if here is None or there is None:
                continue
            ends.append(there.last_end - here.last_end)
            highest.append(there.first_end - here.last_ready)
            lowest.append(there.last_ready - here.first_end)
    if not ends:
        return None
    low, high = max(lowest), min(highest)
    # Bounds that cross mean stamps that are wrong somewhere: then the estimate stands alone.
    ahead = round(median(ends))
    ahead = min(max(ahead, low), high) if low <= high else ahead
    spread = round((percentile(ends, 95) - percentile(ends, 5)) / 2)
    return ClockWindow(keys[0][1], ahead, min(low, ahead), max(high, ahead), spread)


@dataclass(frozen=True)
class _Reduction:
    """One bucket's reduction, as all ranks of one host saw it."""

    last_ready: int
    first_end: int
    last_end: int


def _reductions(ranks: Sequence[tuple[BucketTimes, ...]]) -> Iterator[_Reduction | None]:
    for buckets in zip(*ranks, strict=False):
        if not all(bucket.ready_ns and bucket.ended_ns for bucket in buckets):
            yield None
            continue
        ends = [bucket.ended_ns for bucket in buckets]
        yield _Reduction(max(bucket.ready_ns for bucket in buckets), min(ends), max(ends))


STAMPS = tuple(
    field.name
    for field in dataclasses.fields(StepRecord)
    if field.name.endswith("_ns") and field.name not in ("cpu_ns", "run_delay_ns")
)


def shift(record: StepRecord, ahead_ns: int) -> StepRecord:
    """Return a record with stamps of the reference clock. What did not happen stays zero."""
    if not ahead_ns:
        return record

    def moved(stamp: int) -> int:
        return stamp - ahead_ns if stamp else 0

    buckets = tuple(
        BucketTimes(
            bucket.index,
            bucket.bytes,
            moved(bucket.ready_ns),
            moved(bucket.began_ns),
            moved(bucket.ended_ns),
        )
        for bucket in record.buckets
    )
    stamps: dict[str, Any] = {name: moved(getattr(record, name)) for name in STAMPS}
    return dataclasses.replace(record, buckets=buckets, **stamps)
