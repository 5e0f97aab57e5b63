"""Whole programmes of collectives, drawn by hypothesis, on gloo and on paceline: same assertions.

Rank 0 draws; the others are told each programme over a group of their own, and all tell how they
fared. So ranks live through all examples, and hypothesis can shrink one that fails.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.testing import run_ranks
from tests.examples import examples
from tests.shm.contract import reference
from tests.shm.contract.steps import NOT_COMPLEX, REDUCING, STEPS, TRANSPOSABLE, Call, Step, check
from tests.shm.contract.subjects import SUBJECTS, make_groups

Programme = list[Step]
EXAMPLES = examples(60)
# Around a cache line, what is reduced without slices (16 KiB), and a staging slot (1 MiB).
EDGES = (0, 1, 2, 3, 7, 15, 16, 17, 63, 65, 1000, 4096, 4097, 16385)
SIZES = st.one_of(st.sampled_from(EDGES), st.integers(0, 1000), st.integers(0, 200_000))


@st.composite
def steps(draw: st.DrawFn, world: int) -> Step:
    kind = draw(st.sampled_from(list(STEPS)))
    unknown = reference.COMPLEX if kind in NOT_COMPLEX else ()
    dtype = draw(st.sampled_from([dtype for dtype in reference.DTYPES if dtype not in unknown]))
    can_differ = ("world",) if world == 1 else ("world", "world", "low", "high")
    return Step(
        kind,
        size=draw(SIZES),
        dtype=dtype,
        op=draw(st.sampled_from(reference.ops_of(dtype))) if kind in REDUCING else "SUM",
        root=draw(st.integers(0, world - 1)),
        seed=draw(st.integers(0, 1000)),
        is_async=draw(st.booleans()),
        is_transposed=kind in TRANSPOSABLE and draw(st.booleans()),
        where=draw(st.sampled_from(can_differ)),
    )


def run_programme(programme: Programme, groups: dict[str, Any], is_ordered: bool) -> None:
    """Run all steps, then wait for those that are under way, last first, then check everything."""
    calls = [Call(step, groups[step.where]) for step in programme if groups[step.where]]
    started = [(call, *call.run()) for call in calls]
    for _, work, _ in reversed(started):
        if work is not None:
            work.wait()
    for call, _, found in started:
        check(call, found, is_ordered)


class Stage:
    """The groups under test, and the default group for talking about them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._subjects = {name: make_groups(name) for name in names}
        self.programmes = 0
        self._over = ""

    def perform(self, programme: Programme) -> None:
        """Run a programme on every subject. Raises on every rank, if it failed on one."""
        for name, groups in self._subjects.items():
            assert not self._over, self._over
            trouble: tuple[str, bool] | None = None
            try:
                run_programme(programme, groups, is_ordered=name == "paceline")
            except Exception as error:
                trouble = traceback.format_exc(), isinstance(error, AssertionError)
            self._agree(name, programme, trouble)
        self.programmes += 1

    def _agree(self, name: str, programme: Programme, trouble: tuple[str, bool] | None) -> None:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, trouble)
        for rank, (text, is_wrong) in ((r, each) for r, each in enumerate(told) if each):
            text = f"{name}, rank {rank}: {text}"
            if not is_wrong:  # the group cannot be used any more: a smaller programme fails, too
                self._over = f"{text}\nin {programme}"
            raise AssertionError(text)


def drive(names: tuple[str, ...]) -> int:
    stage = Stage(names)
    if dist.get_rank() > 0:
        _follow(stage)
        return stage.programmes

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(steps(dist.get_world_size()), min_size=1, max_size=12))
    def each(programme: Programme) -> None:
        dist.broadcast_object_list([programme], 0)
        stage.perform(programme)

    try:
        each()
    finally:
        dist.broadcast_object_list([None], 0)
    return stage.programmes


def _follow(stage: Stage) -> None:
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0)
        if box[0] is None:
            return
        try:
            stage.perform(box[0])
        except AssertionError:
            continue  # rank 0 has heard of it, and goes on to look for a smaller one


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]
)
@pytest.mark.hypothesis
def test_programmes_give_what_one_process_computes(ranks: int) -> None:
    names = SUBJECTS if ranks > 2 else SUBJECTS[:2]
    assert min(run_ranks(ranks, drive, names, timeout_s=250)) >= EXAMPLES
