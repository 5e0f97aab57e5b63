"""Torch's tools on the backend ``paceline`` return what they return on gloo, bit for bit."""

from __future__ import annotations

import pytest
import torch

from paceline.native.extension import missing_reason
from tests.shm.c10d import groups, sharded, state
from tests.shm.c10d.uses import FAILED, Results, Use, on_both

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
ON_TWO: list[Use] = [*sharded.ON_TWO, *groups.ON_TWO, *state.ON_TWO]
ON_FOUR: list[Use] = [*sharded.ON_FOUR, *groups.ON_FOUR]
# What torch refuses on gloo, with a part of its words; docs/shared-memory.md has the list.
GLOO_CANNOT = (
    {"splits": "No device associated with the default pg, not safe to split"}
    if torch.__version__ < "2.15"
    else {}
)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return on_both(ON_TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return on_both(ON_FOUR, 4, tmp_path_factory.mktemp("four"))


def check(name: str, results: Results) -> None:
    for rank, (of_gloo, of_ours) in enumerate(
        zip(results["gloo"], results["paceline"], strict=True)
    ):
        if name in GLOO_CANNOT:
            assert GLOO_CANNOT[name] in of_gloo[name], rank
        else:
            assert not of_gloo[name].startswith(FAILED), of_gloo[name]
        assert of_ours[name] == of_gloo[name], rank


@pytest.mark.parametrize("name", [use.__name__ for use in ON_TWO])
def test_on_two_ranks(name: str, of_two: Results) -> None:
    check(name, of_two)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="of the torch we pin")
def test_all_functional_collectives_are_used(of_two: Results) -> None:
    """What docs/shared-memory.md says."""
    for rank in of_two["paceline"]:
        assert rank["functional_operators_not_used"] == "[]"


@pytest.mark.parametrize("name", [use.__name__ for use in ON_FOUR])
def test_on_four_ranks(name: str, of_four: Results) -> None:
    check(name, of_four)


@pytest.mark.slow
@pytest.mark.parametrize("use", state.SLOW, ids=lambda use: use.__name__)
def test_workers_that_import_torch(use: Use, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(use.__name__, on_both([use], 2, tmp_path_factory.mktemp("workers")))
