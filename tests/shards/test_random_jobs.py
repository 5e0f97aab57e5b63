"""Elastic jobs drawn at random: models, shards, ranks, buckets, kills and resizes.

Each ends with the bits of an undisturbed training on one rank; one that does not is a failure.
``test_properties.py`` draws many more, of ranks that leave and join without dying.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline.testing import run_ranks
from tests.elastic import jobs
from tests.examples import draw_seed
from tests.shards import alone
from tests.shards.drawn import Drawn, trainings
from tests.shards.test_elastic import Fault, scaler

STEPS = 30
JOBS = 40 if os.environ.get("PACELINE_LONG") else 4


@dataclass(frozen=True)
class Job:
    """A training, and what becomes of its ranks.

    Attributes:
        drawn: The training.
        ranks: At the beginning.
        faults: Whoever has the rank then is killed.
        targets: Numbers of ranks that are asked for, one after the other.
    """

    drawn: Drawn
    ranks: int
    faults: tuple[Fault, ...]
    targets: tuple[int, ...]


@st.composite
def drawn_jobs(draw: st.DrawFn) -> Job:
    """Draw one of which a rank is left at every moment, whoever dies before others come."""
    steps = draw(st.lists(st.integers(2, STEPS - 5), max_size=2, unique=True))
    least = len(steps) + 1
    points = st.sampled_from(["shard", "last shard", "between"])
    # Somebody has the rank, also if nobody has come yet for those that died before.
    faults = tuple(
        (draw(points), step, draw(st.integers(0, least - 1 - dead)))
        for dead, step in enumerate(sorted(steps))
    )
    worlds = draw(st.lists(st.integers(least, 4), min_size=1 if faults else 2, max_size=3))
    resized = [b for a, b in itertools.pairwise(worlds) if a != b]
    return Job(draw(trainings(4)), worlds[0], faults, tuple(resized))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_any_job_ends_with_the_bits_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SCRIPT", Path(__file__).parent / "elastic_script.py")
    changes = []

    @hypothesis.seed(draw_seed())
    @settings(
        max_examples=JOBS,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # to shrink a job takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_jobs())
    def ends_as_on_one_rank(job: Job) -> None:
        expected = run_ranks(1, alone.train, job.drawn, STEPS, timeout_s=200)[0]
        with tempfile.TemporaryDirectory() as folder:
            ended = jobs.run_job(
                Path(folder),
                ranks=job.ranks,
                steps=STEPS,
                faults=job.faults,  # type: ignore[arg-type]
                pause_s=0.05,
                options={"drawn": asdict(job.drawn)},
                on_wait=scaler(job.ranks, list(job.targets)),
            )
            assert ended.code == 0, f"{job}\n{ended.logs()}"
            found = {each["digest"] for each in ended.results()}
            assert found == {expected}, f"{job}\n{ended.logs()}"
            assert ended.fired() == len(job.faults), f"{job}\n{ended.logs()}"
            changes.append(len(ended.events()) - 1)

    ends_as_on_one_rank()
    assert len(changes) >= JOBS
    assert sum(changes) >= JOBS, "nearly nothing has happened"
