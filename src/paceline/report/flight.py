"""The reductions of a run in the form of torch's flight recorder, for ``torchfrtrace``.

torch's recorder must be on while a job runs; these are from the records that Paceline keeps anyway.
Each bucket of each step is one all-reduce. A rank that has ended before the others lacks its
last ones, and ``torchfrtrace`` names it. Called by ``cli/report.py``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.records import BucketTimes, RankHistory, StepRecord
from paceline.report.clocks import Key

VERSION = "2.10"
"""Of the dump's format, as torch 2.13 writes it."""
PREFIX = "rank_"
GROUP = ("0", "default_pg")
# As torch's own ring; torchfrtrace compares all of them with each other.
NEWEST = 2000
FLOAT_BYTES = 4


def write_dumps(folder: Path, histories: Sequence[RankHistory]) -> list[Path]:
    """Write one file for each rank; return their paths."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    timelines = {history.info.rank: _by_key(history) for history in histories}
    keys = _newest_keys(list(timelines.values()))
    ranks = sorted(timelines)
    written = []
    for history in histories:
        entries = _entries(history, timelines[history.info.rank], keys)
        group = {"name": GROUP[0], "desc": GROUP[1], "ranks": str(ranks)}
        dump = {
            "version": VERSION,
            "pg_config": {GROUP[0]: group},
            "pg_status": {},
            "entries": list(entries),
        }
        path = folder / f"{PREFIX}{history.info.rank}"
        path.unlink(missing_ok=True)  # what is there may be open to others
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb") as file:
            pickle.dump(dump, file)
        written.append(path)
    return written


def _by_key(history: RankHistory) -> dict[Key, StepRecord]:
    records = sorted(history.steps, key=lambda record: record.reduced_ns)
    return {(record.wrapper, record.step): record for record in records}


def _newest_keys(timelines: Sequence[Mapping[Key, StepRecord]]) -> list[Key]:
    """Return the newest steps, from where on every rank has records: a ring may begin later."""
    longest = max(timelines, key=lambda timeline: list(timeline)[-1:] or [(0, 0)])
    keys = list(longest)
    begins = [keys.index(first) for line in timelines for first in list(line)[:1] if first in keys]
    keys = keys[max(begins, default=0) :]
    buckets = max((len(record.buckets) for record in longest.values()), default=1)
    return keys[-max(1, NEWEST // max(1, buckets)) :]


def _entries(
    history: RankHistory, timeline: Mapping[Key, StepRecord], keys: Sequence[Key]
) -> Iterator[dict[str, Any]]:
    sequence = 0
    for key in keys:
        record = timeline.get(key)
        if record is None:
            return
        for bucket in record.buckets:
            sequence += 1
            yield _entry(history, record, bucket, sequence)


def _entry(
    history: RankHistory, record: StepRecord, bucket: BucketTimes, sequence: int
) -> dict[str, Any]:
    wall = history.info.wall_minus_monotonic_ns
    sizes = [[bucket.bytes // FLOAT_BYTES]]
    is_done = bucket.ended_ns > 0
    return {
        "record_id": sequence - 1,
        "pg_id": 0,
        "process_group": GROUP,
        "thread_name": "",
        "thread_id": str(history.info.pid),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "gloo:all_reduce",  # torchfrtrace refuses backends it does not know
        "time_created_ns": bucket.began_ns + wall,
        "input_sizes": sizes,
        "input_dtypes": ["Float"],
        "output_sizes": sizes,
        "output_dtypes": ["Float"],
        "time_discovered_started_ns": bucket.began_ns + wall,
        "time_discovered_completed_ns": bucket.ended_ns + wall if is_done else None,
        "duration_ms": (bucket.ended_ns - bucket.began_ns) / 1e6 if is_done else None,
        "timeout_ms": 0,
        "is_p2p": False,
        "state": "completed" if is_done else "started",
        "retired": is_done,
        "frames": [
            {
                "name": f"bucket {bucket.index} of step {record.step}",
                "filename": f"wrapper {record.wrapper}",
                "line": bucket.index,
            }
        ],
    }
