"""Records for tests: one of each kind, and strategies that make any."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.observe.records import (
    Activity,
    BucketInfo,
    BucketTimes,
    Note,
    RankInfo,
    Status,
    StepRecord,
)

INFO = RankInfo(
    rank=1,
    local_rank=1,
    world=4,
    host="node7",
    pid=4711,
    threads=2,
    cores=8,
    transport="shm",
    transport_reason="all ranks share memory",
    wall_minus_monotonic_ns=1_700_000_000_000_000_000,
)


def make_step(number: int, buckets: int = 3, wrapper: int = 0) -> StepRecord:
    """A step whose every value depends on its number."""
    at = number * 10_000_000
    return StepRecord(
        step=number,
        wrapper=wrapper,
        began_ns=at + 1,
        forward_began_ns=at + 2,
        forward_ended_ns=at + 3,
        backward_began_ns=at + 4,
        backward_ended_ns=at + 5,
        reduced_ns=at + 6,
        optimizer_began_ns=at + 7,
        optimizer_ended_ns=at + 8,
        buckets=tuple(
            BucketTimes(i, 1000 * i, at + 10 * i, at + 10 * i + 1, at + 10 * i + 2)
            for i in range(buckets)
        ),
        loss=1.0 / number,
        samples=number,
        cpu_ns=number + 1,
        run_delay_ns=number + 2,
        major_faults=number + 3,
        is_skipped=number % 2 == 0,
    )


ints = st.integers(-(1 << 62), 1 << 62)
floats = st.floats(allow_nan=False)
texts = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), max_size=200)
names = st.text(st.characters(codec="utf-8", categories=("L",)), min_size=1, max_size=16)

bucket_columns = st.lists(st.tuples(ints, ints, ints, ints), max_size=40)
steps = st.builds(
    StepRecord,
    step=ints,
    wrapper=st.integers(0, 1000),
    began_ns=ints,
    forward_began_ns=ints,
    forward_ended_ns=ints,
    backward_began_ns=ints,
    backward_ended_ns=ints,
    reduced_ns=ints,
    optimizer_began_ns=ints,
    optimizer_ended_ns=ints,
    buckets=bucket_columns.map(
        lambda rows: tuple(BucketTimes(index, *row) for index, row in enumerate(rows))
    ),
    loss=floats,
    samples=ints,
    cpu_ns=ints,
    run_delay_ns=ints,
    major_faults=ints,
    is_skipped=st.booleans(),
    is_joined=st.booleans(),
    numbers=st.lists(st.tuples(names, floats), max_size=8).map(tuple),
)
notes = st.builds(Note, at_ns=ints, kind=st.text("abcdef", max_size=20), text=texts)
buckets = st.builds(
    BucketInfo,
    wrapper=st.integers(0, 10),
    index=st.integers(0, 100),
    bytes=st.integers(0, 1 << 40),
    parameters=st.lists(texts, max_size=20).map(tuple),
    first_step=st.integers(1, 1000),
)
infos = st.builds(
    RankInfo,
    rank=st.integers(0, 100_000),
    local_rank=st.integers(0, 100),
    world=st.integers(1, 100_000),
    host=texts,
    pid=st.integers(1, 1 << 22),
    threads=st.integers(1, 1024),
    cores=st.integers(1, 1024),
    transport=texts,
    transport_reason=texts,
    wall_minus_monotonic_ns=ints,
)
statuses = st.builds(
    Status,
    activity=st.sampled_from(Activity),
    since_ns=st.integers(0, 1 << 50).map(lambda stamp: stamp << 12),
    step=st.integers(0, 1 << 40),
    beat_ns=ints,
    loss=floats,
    samples_per_s=floats,
    waiting_share=floats,
    last_rank=st.integers(-1, 100_000),
    rss_bytes=st.integers(0, 1 << 50),
    detail=texts,
)
