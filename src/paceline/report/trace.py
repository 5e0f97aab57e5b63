"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event format.

One process for each rank, one track for what it does, one for each bucket. An arrow leads from the
rank that started a reduction last to all others. Called by ``cli/report.py``.

Tracks have numbers of their own in all ranks: Perfetto mixes up a track whose number is another
rank's with that rank's main thread, and drops what overlaps. Times are whole microseconds. It takes
a fraction as a double and cuts it to nanoseconds, so slices that only touch could overlap, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import IO, Any

from paceline.observe.records import StepRecord
from paceline.report.analysis import Analysis
from paceline.report.buckets import reductions_of
from paceline.report.phases import to_ms
from paceline.report.steps import JobStep, RankStep

Event = dict[str, Any]
STEP_TRACK = 0
_TRACKS = 100_000
"""Of one rank, at most."""


def write_trace(file: IO[str], analysis: Analysis, steps: Sequence[JobStep]) -> None:
    """Write the trace, event by event: it can be long."""
    file.write('{"displayTimeUnit":"ms","otherData":')
    json.dump({"run": analysis.name, "made by": "paceline report"}, file)
    file.write(',"traceEvents":[\n')
    for number, event in enumerate(_events(analysis, steps)):
        file.write(",\n" if number else "")
        json.dump(event, file, separators=(",", ":"), allow_nan=False)
    file.write("\n]}\n")


def _events(analysis: Analysis, steps: Sequence[JobStep]) -> Iterator[Event]:
    origin = min(
        (each.record.began_ns for step in steps for each in step.ranks.values()), default=0
    )
    yield from _names(analysis)
    yield from _changes(analysis, steps, origin)
    arrows = 0
    for step in steps:
        for rank, each in step.ranks.items():
            yield from _phases(rank, each, origin)
            yield from _buckets(step, rank, origin)
        for arrow in _arrows(step, origin, arrows):
            arrows = max(arrows, arrow["id"])
            yield arrow


def _changes(analysis: Analysis, steps: Sequence[JobStep], origin: int) -> Iterator[Event]:
    """Where ranks of an elastic job left or joined: at the first step after it."""
    for change in analysis.membership:
        after = next((step for step in steps if step.number > change.step), None)
        if change.epoch and after is not None:
            at = min(each.before.reduced_ns for each in after.ranks.values())
            yield {
                "ph": "i",
                "s": "g",
                "name": f"epoch {change.epoch}: {change.world} ranks",
                "pid": min(after.ranks),
                "tid": _tid(min(after.ranks), STEP_TRACK),
                "ts": max(0, at - origin) // 1000,
                "args": {"why": change.why, "took (s)": change.took_s, "from step": change.step},
            }


def _names(analysis: Analysis) -> Iterator[Event]:
    for rank in analysis.ranks:
        name = {"name": f"rank {rank.rank} ({rank.host}, pid {rank.pid})"}
        yield _meta("process_name", rank.rank, STEP_TRACK, name)
        yield _meta("process_sort_index", rank.rank, STEP_TRACK, {"sort_index": rank.rank})
        yield _meta("thread_name", rank.rank, STEP_TRACK, {"name": "step"})
        for bucket in analysis.buckets:
            track = _track(bucket.wrapper, bucket.index)
            name = {"name": f"bucket {bucket.index}"}
            yield _meta("thread_name", rank.rank, track, name)


def _track(wrapper: int, bucket: int) -> int:
    return 1 + 1000 * wrapper + bucket


def _tid(rank: int, track: int) -> int:
    return _TRACKS * (rank + 1) + track


def _meta(name: str, rank: int, track: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": _tid(rank, track), "args": args}


def _slice(name: str, rank: int, track: int, from_ns: int, to_ns: int, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": _tid(rank, track),
        "ts": from_ns // 1000,
        "dur": max(0, to_ns // 1000 - from_ns // 1000),
        "args": args,
    }


def _phases(rank: int, each: RankStep, origin: int) -> Iterator[Event]:
    record = each.record
    arrived = max(record.backward_ended_ns, each.arrived_ns)
    stamps = (
        ("input", record.began_ns, record.forward_began_ns),
        ("forward", record.forward_began_ns, record.forward_ended_ns),
        ("loss", record.forward_ended_ns, record.backward_began_ns),
        ("backward", record.backward_began_ns, arrived),
        ("waiting for ranks", arrived, record.reduced_ns - each.exposed_ns),
        ("communication", record.reduced_ns - each.exposed_ns, record.reduced_ns),
        ("optimizer", record.reduced_ns, record.optimizer_ended_ns),
    )
    facts = {"step": record.step, "others waited for it (ms)": to_ms(each.blame_ns)}
    for name, began, ended in stamps:
        if began and ended > began:
            yield _slice(name, rank, STEP_TRACK, began - origin, ended - origin, **facts)
    yield from _loss(rank, record, origin)


def _loss(rank: int, record: StepRecord, origin: int) -> Iterator[Event]:
    if math.isfinite(record.loss):
        at = (record.reduced_ns - origin) // 1000
        yield {"ph": "C", "name": "loss", "pid": rank, "ts": at, "args": {"loss": record.loss}}


def _buckets(step: JobStep, rank: int, origin: int) -> Iterator[Event]:
    wrapper, number = step.key
    for reduction in reductions_of(step, rank):
        times = reduction.times
        track = _track(wrapper, times.index)
        if times.ready_ns and reduction.from_ns > times.ready_ns:
            span = (times.ready_ns - origin, reduction.from_ns - origin)
            yield _slice("ready", rank, track, *span, step=number)
        span = (reduction.from_ns - origin, times.ended_ns - origin)
        facts: dict[str, Any] = {
            "step": number,
            "bytes": times.bytes,
            "exposed (ms)": to_ms(reduction.exposed_ns),
        }
        yield _slice("reducing", rank, track, *span, **facts)


def _arrows(step: JobStep, origin: int, used: int) -> Iterator[Event]:
    """From the rank that started a reduction last to all others."""
    starts: dict[int, list[tuple[int, int, int]]] = {}
    for rank, each in step.ranks.items():
        for bucket in each.record.buckets:
            began = bucket.began_ns or bucket.ready_ns
            starts.setdefault(bucket.index, []).append((began, rank, bucket.ended_ns))
    for index, ranks in starts.items():
        began, last, _ = max(ranks)
        for _, rank, ended in ranks:
            if rank == last or not ended:
                continue
            used += 1
            track = _track(step.key[0], index)
            arrow = {"name": "last to start", "cat": "bucket", "id": used}
            start, end = (began - origin) // 1000, (ended - origin) // 1000
            source = {"pid": last, "tid": _tid(last, track), "ts": start}
            target = {"pid": rank, "tid": _tid(rank, track), "ts": end}
            yield {**arrow, "ph": "s", **source}
            yield {**arrow, "ph": "f", "bp": "e", **target}
