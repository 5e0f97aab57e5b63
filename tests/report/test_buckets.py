"""Overlap, exposed communication and the advice that follows, against jobs whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.report.analysis import Analysis, analyse
from paceline.report.phases import Phase
from tests.examples import examples
from tests.report.histories import MIB, Delay, Job, make_run


def analysis_of(job: Job) -> Analysis:
    return analyse(make_run(job)).analysis


def rules(job: Job) -> list[str]:
    return [advice.rule for advice in analysis_of(job).advice]


def test_only_the_last_bucket_is_exposed() -> None:
    """Ready at 8, 20, 32 and 40 ms of 40; they take 1, 5, 5 and 2 ms."""
    found = analysis_of(Job())
    assert [bucket.ready_ms for bucket in found.buckets] == [8.0, 20.0, 32.0, 40.0]
    assert [bucket.reduce_ms for bucket in found.buckets] == [1.0, 5.0, 5.0, 2.0]
    assert [bucket.exposed_ms for bucket in found.buckets] == [0.0, 0.0, 0.0, 2.0]
    assert found.overlap.communication_ms == 13.0
    assert found.overlap.exposed_ms == 2.0
    assert found.overlap.hidden_share == pytest.approx(11 / 13)
    assert found.overlap.backward_ms == 40.0
    assert [bucket.is_ready_at_end for bucket in found.buckets] == [False, False, False, True]
    assert found.buckets[1].gb_per_s == pytest.approx(25 * MIB / 0.005 / 1e9)
    assert found.buckets[1].parameters == ("layers.1.weight",)


def test_a_reduction_under_way_is_exposed_from_the_end_of_backward_on() -> None:
    found = analysis_of(Job(reduce_ms=(1.0, 5.0, 12.0, 2.0)))
    # The third begins at 32 and ends at 44, the fourth follows until 46; backward ends at 40.
    assert [bucket.exposed_ms for bucket in found.buckets] == [0.0, 0.0, 4.0, 2.0]


def test_waiting_for_a_slow_rank_is_no_communication() -> None:
    found = analysis_of(Job(delays=(Delay(3, Phase.BACKWARD, 300.0),)))
    assert found.overlap.exposed_ms == 2.0
    assert {bucket.last_rank for bucket in found.buckets} == {3}
    assert all(bucket.last_share == 1.0 for bucket in found.buckets)
    assert all(rank.exposed == 2.0 for rank in found.ranks)


def test_buckets_from_before_they_were_cut_anew_do_not_count() -> None:
    run = make_run(Job(steps=20))
    histories = []
    for history in run.histories:
        final = tuple(replace(info, first_step=11) for info in history.info.buckets)
        early = [
            replace(record, buckets=record.buckets[:2]) if record.step < 11 else record
            for record in history.steps
        ]
        info = replace(history.info, buckets=(*history.info.buckets[:2], *final))
        histories.append(replace(history, info=info, steps=tuple(early)))
    found = analyse(replace(run, histories=tuple(histories))).analysis
    assert [bucket.exposed_ms for bucket in found.buckets] == [0.0, 0.0, 0.0, 2.0]


@settings(max_examples=examples(40))
@given(
    st.lists(st.floats(0.01, 60), min_size=4, max_size=4),
    st.floats(0, 0.4),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_exposed_buckets_add_up(reduce_ms: list[float], jitter: float, slow: list[int]) -> None:
    delays = tuple(Delay(rank, Phase.BACKWARD, 30.0) for rank in slow)
    job = Job(steps=6, reduce_ms=tuple(reduce_ms), jitter=jitter, delays=delays)
    found = analysis_of(job)
    total = sum(bucket.exposed_ms for bucket in found.buckets)
    assert total == pytest.approx(found.overlap.exposed_ms, abs=0.01)
    assert 0 <= found.overlap.hidden_share <= 1
    assert found.overlap.exposed_ms <= found.overlap.communication_ms + 0.001
    for rank in found.ranks:
        assert rank.exposed == pytest.approx(found.overlap.exposed_ms, abs=0.01)


def test_advice_is_silent_if_all_is_well() -> None:
    assert rules(Job(reduce_ms=(0.1, 0.5, 0.5, 0.1))) == []


ONE = {"bucket_bytes": (100 * MIB,), "ready_at": (1.0,), "reduce_ms": (20.0,)}


@pytest.mark.parametrize(
    ("rule", "job"),
    [
        ("one-bucket", Job(**ONE)),  # type: ignore[arg-type]
        ("last-bucket", Job(reduce_ms=(1.0, 5.0, 5.0, 9.0))),
        ("first-bucket", Job(ready_at=(0.7, 0.8, 0.9, 1.0), reduce_ms=(5.0, 5.0, 5.0, 2.0))),
        (
            "small-buckets",
            Job(
                bucket_bytes=(1000,) * 16,
                ready_at=tuple((at + 1) / 16 for at in range(16)),
                reduce_ms=(4.0,) * 16,
            ),
        ),
        ("slow-link", Job(reduce_ms=(5.0, 80.0, 80.0, 30.0), transport="c10d:gloo")),
        ("not-shared", Job(reduce_ms=(1.0, 5.0, 5.0, 9.0), transport="c10d:gloo")),
        ("out-of-order", Job(ready_at=(0.2, 1.0, 0.6, 0.7), reduce_ms=(1.0, 9.0, 9.0, 9.0))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule(rule: str, job: Job) -> None:
    found = [advice for advice in analysis_of(job).advice if advice.rule == rule]
    assert found
    assert found[0].gain_ms > 0


def test_unused_parameters_are_named() -> None:
    job = Job(ready_at=(0.2, 1.0, 0.6, 0.7), reduce_ms=(1.0, 9.0, 9.0, 9.0))
    (advice,) = (each for each in analysis_of(job).advice if each.rule == "out-of-order")
    assert "unused parameters" in advice.text
    assert "layers.1.weight" in advice.text


def test_gloo_between_hosts_is_no_mistake() -> None:
    job = Job(
        reduce_ms=(1.0, 5.0, 5.0, 9.0),
        transport="c10d:gloo",
        hosts=("alpha", "beta"),
        clock_ms=(0.0, 9.0),
        drift_ppm=(0.0, 0.0),
    )
    assert "not-shared" not in rules(job)
