"""The likely cause of a delay, from what the kernel counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.observe.records import Note
from paceline.report.analysis import Suspect, analyse
from paceline.report.causes import Cause
from paceline.report.counts import spread_counts
from paceline.report.phases import Phase
from paceline.report.wording import headline, warnings
from tests.report.histories import MS, Delay, Job, make_run

CHECKPOINT = Delay(2, Phase.INPUT, 2000.0, steps=lambda step: step % 25 == 0)
NO_CORE = Delay(2, Phase.BACKWARD, 50.0, run_delay=0.9)
STOLEN = Delay(2, Phase.BACKWARD, 50.0, cpu=0.1, stolen=0.8)


def suspect(job: Job) -> Suspect:
    found = analyse(make_run(job)).analysis.culprit
    assert found is not None
    assert found.straggler.rank == 2
    return found


@pytest.mark.parametrize(
    ("job", "cause", "words"),
    [
        (Job(delays=(NO_CORE,)), Cause.NO_CORE, "wait for a core"),
        (Job(delays=(NO_CORE,), threads=4), Cause.TOO_MANY_THREADS, "16 threads on 8 cores"),
        (
            Job(delays=(NO_CORE,), notes=((2, Note(1, "throttled", "cpu.max")),)),
            Cause.THROTTLED,
            "CPU quota",
        ),
        (
            Job(delays=(Delay(2, Phase.FORWARD, 50.0, faults=100),)),
            Cause.PAGING,
            "pages come from disk",
        ),
        (Job(delays=(STOLEN,)), Cause.STOLEN, "the hypervisor gives its cores to other machines"),
        (
            Job(delays=(Delay(2, Phase.FORWARD, 50.0, faults=800),)),
            Cause.PAGING,
            "pages come from disk",
        ),
        (Job(delays=(Delay(2, Phase.INPUT, 50.0),)), Cause.DATA_LOADER, "waits for its data"),
        (Job(delays=(Delay(2, Phase.INPUT, 50.0, cpu=1.0),)), Cause.DATA_LOADER, "num_workers"),
        (Job(steps=100, delays=(CHECKPOINT,)), Cause.BETWEEN_STEPS, "a checkpoint, an evaluation"),
        (Job(delays=(Delay(2, Phase.FORWARD, 50.0, cpu=0.95),)), Cause.MORE_WORK, "computes more"),
        (Job(delays=(Delay(2, Phase.BACKWARD, 50.0),)), Cause.BLOCKED, "it sleeps"),
        (Job(delays=(Delay(2, Phase.OPTIMIZER, 50.0, run_delay=1.0),)), Cause.NO_CORE, "core"),
        (Job(delays=(Delay(2, Phase.LOSS, 50.0),), has_counts=False), Cause.UNKNOWN, "not known"),
    ],
    ids=lambda value: value.value if isinstance(value, Cause) else "",
)
def test_causes(job: Job, cause: Cause, words: str) -> None:
    found = suspect(job)
    assert found.diagnosis.cause is cause
    assert words in found.diagnosis.text
    assert found.diagnosis.evidence


def test_one_off_in_the_optimizer() -> None:
    """The counters of an optimizer are in the record of the step before the one that waits."""
    delay = Delay(2, Phase.OPTIMIZER, 9000.0, steps=lambda step: step == 20, run_delay=1.0)
    found = suspect(Job(delays=(delay,)))
    assert found.diagnosis.cause is Cause.NO_CORE
    assert found.straggler.from_step == 21


def test_counters_that_are_read_now_and_then() -> None:
    """All ranks wait for cores alike; what the kernel counted arrives in some steps only."""
    run = make_run(Job(steps=300, delays=(Delay(2, Phase.BACKWARD, 50.0),)))
    histories = []
    for history in run.histories:
        every = (5, 40, 90, 7)[history.info.rank]
        steps = tuple(
            replace(record, run_delay_ns=(record.step % every == 0) * every * 20 * MS)
            for record in history.steps
        )
        first = replace(steps[0], run_delay_ns=9000 * MS)  # from before training
        steps = (first, *steps[1:])
        histories.append(replace(history, steps=steps))
    found = analyse(replace(run, histories=tuple(histories))).analysis.culprit
    assert found is not None
    assert found.diagnosis.cause is Cause.BLOCKED


def test_all_ranks_wait_for_cores_for_longer_than_one_is_late() -> None:
    """Delays are counted together, so nobody knows which steps had them: it may be the cause."""
    run = make_run(Job(steps=300, delays=(Delay(2, Phase.BACKWARD, 50.0),)))
    histories = tuple(
        replace(
            history,
            steps=tuple(
                replace(record, run_delay_ns=(record.step % 5 == 0) * 5 * 60 * MS)
                for record in history.steps
            ),
        )
        for history in run.histories
    )
    found = analyse(replace(run, histories=histories)).analysis.culprit
    assert found is not None
    assert found.diagnosis.cause is Cause.UNKNOWN
    assert "all ranks wait for cores" in found.diagnosis.text
    assert "60 ms waiting for a core" in found.diagnosis.evidence


def test_a_count_is_divided_by_the_length_of_steps() -> None:
    records = make_run(Job(steps=4)).histories[0].steps
    counted = [replace(records[0]), *records[1:3], replace(records[3], run_delay_ns=30 * MS)]
    found = [record.run_delay_ns for record in spread_counts(counted, 1)]
    assert sum(found) == pytest.approx(30 * MS, abs=4)
    assert found[1] / found[3] == pytest.approx(counted[1].duration_ns / counted[3].duration_ns)
    # More than all threads all the time is not from these steps.
    too_much = [replace(records[0], run_delay_ns=10**12)]
    assert spread_counts(too_much, 2)[0].run_delay_ns == 2 * records[0].duration_ns


def test_a_delay_is_not_divided_among_steps_that_had_none() -> None:
    """1 ns means that it was asked for, and there was none."""
    records = make_run(Job(steps=6)).histories[0].steps
    asked = {2: 1, 5: 30 * MS}
    counted = [replace(record, run_delay_ns=asked.get(at, 0)) for at, record in enumerate(records)]
    found = [record.run_delay_ns for record in spread_counts(counted, 1)]
    assert sum(found[:3]) == 1
    assert sum(found[3:]) == pytest.approx(30 * MS, abs=4)
    assert all(found[3:])


def test_cpu_time_and_faults_are_divided_among_the_steps_that_they_are_from() -> None:
    """Steps shorter than 50 ms: CPU time and faults are asked for in some of them."""
    records = make_run(Job(steps=6)).histories[0].steps
    asked = {1: (50 * MS, 0), 4: (90 * MS, 7)}
    counted = [
        replace(record, cpu_ns=asked.get(at, (0, 0))[0], major_faults=asked.get(at, (0, 0))[1])
        for at, record in enumerate(records)
    ]
    found = spread_counts(counted, 1)
    assert sum(record.cpu_ns for record in found[:2]) == 50 * MS
    assert sum(record.cpu_ns for record in found[2:5]) == 90 * MS
    assert found[2].cpu_ns == pytest.approx(90 * MS / 3, rel=0.2)
    assert [record.major_faults for record in found[:2]] == [0, 0]
    assert sum(record.major_faults for record in found[2:5]) == 7  # none is lost
    assert (found[5].cpu_ns, found[5].major_faults) == (0, 0)


def test_more_ranks_than_cores() -> None:
    found = analyse(make_run(Job(delays=(NO_CORE,), cores=2))).analysis
    assert found.culprit is not None
    assert "4 threads on 2 cores; use fewer ranks" in found.culprit.diagnosis.text
    assert any("they take turns; use fewer ranks" in text for text in warnings(found))


def test_cores_are_stolen_from_all_ranks_of_a_host() -> None:
    """Nobody has more of it than the others, but one of them was hit: more than in other steps."""
    hit = STOLEN.ms * 20
    late = Delay(2, Phase.BACKWARD, hit, steps=lambda step: step == 30)
    run = make_run(Job(steps=60, delays=(late,)))
    assert analyse(run).analysis.culprit.diagnosis.cause is Cause.BLOCKED  # type: ignore[union-attr]
    histories = []
    for history in run.histories:
        steps = tuple(
            replace(record, stolen_ns=round(0.7 * hit * MS) if record.step == 30 else 1)
            for record in history.steps
        )
        histories.append(replace(history, steps=steps))
    found = analyse(replace(run, histories=tuple(histories))).analysis.culprit
    assert found is not None
    assert found.diagnosis.cause is Cause.STOLEN
    # The same all the time is what the host is like, and says nothing about this step.
    always = [
        replace(
            history,
            steps=tuple(replace(step, stolen_ns=step.duration_ns // 2) for step in history.steps),
        )
        for history in run.histories
    ]
    found = analyse(replace(run, histories=tuple(always))).analysis.culprit
    assert found is not None
    assert found.diagnosis.cause is Cause.BLOCKED


@pytest.mark.parametrize("stalls", [7, 2])
def test_rare_stalls_are_not_diluted(stalls: int) -> None:
    """All ranks are late now and then, by little: that is no part of what the stalls say."""
    delay = Delay(2, Phase.INPUT, 900.0, steps=lambda step: step % (1200 // stalls) == 50)
    found = suspect(Job(steps=1200, jitter=0.05, delays=(delay,)))
    late_ms = float(found.diagnosis.evidence.split()[0])
    assert 850 < late_ms < 950


def test_more_samples() -> None:
    run = make_run(Job(delays=(Delay(2, Phase.FORWARD, 50.0, cpu=1.0),)))
    slow = run.histories[2]
    steps = tuple(replace(record, samples=64) for record in slow.steps)
    histories = tuple(
        replace(history, steps=steps) if history is slow else history for history in run.histories
    )
    found = analyse(replace(run, histories=histories)).analysis.culprit
    assert found is not None
    assert found.diagnosis.text == "it has 2 times the samples of the others"


def test_what_ranks_say_alike_is_told_once() -> None:
    """Each rank notes a stall in its own file."""
    said = ("stall 1: Rank 1 is stopped.", "Stall 1: Rank 1 is stopped.", "Stall 1 is over.")
    notes = tuple(
        (rank, Note(rank, "stall", text)) for rank, text in zip((0, 2, 0), said, strict=True)
    )
    assert warnings(analyse(make_run(Job(notes=notes))).analysis) == [
        "Ranks 0, 2: stall 1: Rank 1 is stopped.",
        "Rank 0: Stall 1 is over.",
    ]


def test_headline() -> None:
    job = Job(delays=(NO_CORE,))
    expected = 50 / (8.1 + 4 + 20 + 1 + 90 + 2)
    assert headline(analyse(make_run(job)).analysis) == (
        f"Rank 2 costs the others {100 * expected:.0f} % of their time, in backward; "
        "its threads wait for a core."
    )
    assert headline(analyse(make_run(Job())).analysis).startswith("Nobody holds the others up")
    noisy = analyse(make_run(Job(steps=300, jitter=0.6))).analysis
    assert "no rank in particular" in headline(noisy)
    alone = headline(analyse(make_run(Job(ranks=1))).analysis)
    assert alone.startswith("One rank, which waits for nobody: ")
    slow_link = Job(reduce_ms=(1.0, 5.0, 5.0, 60.0))
    assert "communication that backward does not hide" in headline(
        analyse(make_run(slow_link)).analysis
    )
