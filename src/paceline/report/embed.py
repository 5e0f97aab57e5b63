"""The records inside of a page: columns of 32-bit integers, in microseconds, deflated, in base64.

Written for assets/data.js, which reads the same layout. One block of integers for each rank, column
after column; the first value of a column belongs to the rank's first record:

    step, wrapper, gap, forward_began, forward_ended, backward_began, backward_ended, reduced,
    optimizer_began, optimizer_ended, lost, blame, then ready, began, ended of each bucket

``gap`` is the time from the rank's record before (from the run's first stamp, for the first) to the
begin of this one; all other stamps count from that begin. -1: it did not happen. All are on one
clock. Called by page.py.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.observe.records import StepRecord
from paceline.report.steps import JobStep, RankStep

STAMPS = (
    "forward_began_ns",
    "forward_ended_ns",
    "backward_began_ns",
    "backward_ended_ns",
    "reduced_ns",
    "optimizer_began_ns",
    "optimizer_ended_ns",
)
# A page shall open in a moment. What does not fit is left out, oldest steps first.
MAX_VALUES = 4_000_000
NOT_SEEN = -1
LARGEST = 2**31 - 1


def newest_that_fit(steps: Sequence[JobStep], buckets: int) -> Sequence[JobStep]:
    """Return as many of the newest steps as a page can hold."""
    columns = 5 + len(STAMPS) + 3 * buckets
    values = 0
    for kept, step in enumerate(reversed(steps)):
        values += columns * len(step.ranks)
        if values > MAX_VALUES:
            return steps[len(steps) - kept :]
    return steps


def embed(steps: Sequence[JobStep]) -> dict[str, Any]:
    """Return what assets/data.js takes apart."""
    buckets = max((_bucket_count(step) for step in steps), default=0)
    steps = newest_that_fit(steps, buckets)
    ranks = sorted({rank for step in steps for rank in step.ranks})
    origin = min(
        (each.record.began_ns for step in steps for each in step.ranks.values()), default=0
    )
    rows = {rank: [step for step in steps if rank in step.ranks] for rank in ranks}
    return {
        "buckets": buckets,
        "ranks": [
            {
                "rank": rank,
                "steps": len(rows[rank]),
                "data": _pack(rank, rows[rank], origin, buckets),
            }
            for rank in ranks
        ],
        "losses": [_loss(step) for step in steps],
        "numbers": [step.number for step in steps],
        "wrappers": [step.key[0] for step in steps],
    }


def _bucket_count(step: JobStep) -> int:
    return max(
        (bucket.index + 1 for each in step.ranks.values() for bucket in each.record.buckets),
        default=0,
    )


def _pack(rank: int, steps: Sequence[JobStep], origin_ns: int, buckets: int) -> str:
    mine = [step.ranks[rank] for step in steps]
    begins = [each.record.began_ns for each in mine]
    gaps = [begin - before for before, begin in zip([origin_ns, *begins], begins, strict=False)]
    columns: list[Iterable[int]] = [
        [_limit(step.number) for step in steps],
        [_limit(step.key[0]) for step in steps],
        [_limit(gap // 1000) for gap in gaps],
        *([_since(each.record, getattr(each.record, name)) for each in mine] for name in STAMPS),
        [_limit(each.lost_ns // 1000) for each in mine],
        [_limit(round(each.blame_ns / 1000)) for each in mine],
        *_bucket_columns(mine, buckets),
    ]
    values = array("i")
    for column in columns:
        values.extend(column)
    if sys.byteorder != "little":
        values.byteswap()
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def _bucket_columns(mine: Sequence[RankStep], buckets: int) -> list[list[int]]:
    columns: list[list[int]] = [[NOT_SEEN] * len(mine) for _ in range(3 * buckets)]
    for row, each in enumerate(mine):
        for bucket in each.record.buckets:
            at = 3 * bucket.index
            columns[at][row] = _since(each.record, bucket.ready_ns)
            columns[at + 1][row] = _since(each.record, bucket.began_ns)
            columns[at + 2][row] = _since(each.record, bucket.ended_ns)
    return columns


def _since(record: StepRecord, stamp_ns: int) -> int:
    return _limit((stamp_ns - record.began_ns) // 1000) if stamp_ns else NOT_SEEN


def _limit(value: int) -> int:
    return max(-LARGEST, min(LARGEST, value))


def _loss(step: JobStep) -> float | None:
    """The mean of the ranks that gave one, to 6 digits."""
    given = [each.record.loss for each in step.ranks.values() if math.isfinite(each.record.loss)]
    mean = sum(given) / len(given) if given else math.nan
    return float(f"{mean:.6g}") if math.isfinite(mean) else None


def to_script_json(value: Any) -> str:
    """JSON that can stand in a script element, whatever the strings in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
