"""The plan of a batch: the native core and numpy say the same."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import ps
from paceline.errors import IdRangeError
from paceline.native.extension import native
from paceline.ps.client.batch import FlatBags
from paceline.ps.client.message_plan import NativePlan, NumpyPlan, RowsPlan, planned
from tests.examples import examples
from tests.ps.groups import SHARDINGS, batches, flat, make_group

needs_core = pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
ROWS = (7, 1000, 1000, 1 << 39)
LRS = [0.5, 0.25, 0.125, 1.0]


def configs(tables: int, sharding: str) -> list[ps.TableConfig]:
    return [
        ps.TableConfig(f"t{at}", ROWS[at], 4, mode="sum", sharding=sharding) for at in range(tables)
    ]


def assert_same(core: RowsPlan, numpy: RowsPlan) -> None:
    assert torch.equal(core.places, numpy.places)
    assert torch.equal(core.offsets, numpy.offsets)
    assert core.distinct == numpy.distinct
    assert core.repeats == numpy.repeats
    assert core.counts == numpy.counts
    for one, other in zip(core.shares, numpy.shares, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one[:2] == other[:2]
            assert bytes(one.ids) == bytes(other.ids)
    mine, theirs = core.found, numpy.found
    for field in dataclasses.fields(mine):
        one, other = getattr(mine, field.name), getattr(theirs, field.name)
        assert (one == other).all() if field.name != "tables" else one == other


def assert_bags(plan: NativePlan, inputs: list[FlatBags]) -> None:
    """Each id is in the bag that offsets say."""
    bounds = [*plan.offsets.tolist(), len(plan.places)]
    lengths = torch.tensor([high - low for low, high in itertools.pairwise(bounds)])
    expected = torch.arange(len(lengths)).repeat_interleave(lengths)
    assert torch.equal(plan.bag_of, expected)
    if len(inputs) > 1 and all(each is inputs[0] for each in inputs):
        assert plan.has_shared_bags
        distinct, ranks = inputs[0].ids.unique(return_inverse=True)
        assert torch.equal(plan.ranks, ranks)
        assert torch.equal(plan.first_bag_of, plan.bag_of[: len(ranks)])
        lines = distinct.repeat_interleave(len(inputs))
        assert b"".join(plan.cut(lines, 8)) == plan.found.ids.tobytes()


@needs_core
@settings(max_examples=examples(300))
@given(st.data(), st.sampled_from(SHARDINGS), st.integers(1, 5), st.integers(1, 4))
def test_native_and_numpy_plan_alike(
    data: st.DataObject, sharding: str, servers: int, tables: int
) -> None:
    tables_of = configs(tables, sharding)
    group = make_group(tables_of, servers)
    inputs = data.draw(batches(tables_of, most=data.draw(st.sampled_from([40, 120]))))
    lrs = LRS
    core = planned(group, inputs, lrs)
    assert isinstance(core, NativePlan)
    assert_same(core, NumpyPlan(group, inputs, group.templates(lrs)))
    assert_bags(core, inputs)


@needs_core
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("rows", [500, 10_000_000, 1 << 39])
def test_many_ids_too(sharding: str, rows: int) -> None:
    tables_of = [
        ps.TableConfig(f"t{at}", rows, 4, mode="sum", sharding=sharding) for at in range(2)
    ]
    group = make_group(tables_of, 3)
    inputs = [
        flat(config, torch.randint(rows, (20_000,)).tolist(), [5, 7], weights=False)
        for config in tables_of
    ]
    lrs = LRS[:2]
    core = planned(group, inputs, lrs)
    assert isinstance(core, NativePlan)
    assert_same(core, NumpyPlan(group, inputs, group.templates(lrs)))


@pytest.mark.parametrize("wrong", [7, -1, 1 << 62, -(1 << 62)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_an_id_out_of_range_is_named_with_its_table(wrong: int, is_shared: bool) -> None:
    tables_of = configs(2, "hash")[::-1]
    group = make_group(tables_of, 2)
    small = flat(tables_of[1], [3, wrong], [1], weights=False)
    other = small if is_shared and wrong == 7 else flat(tables_of[0], [3, 4], [1], weights=False)
    with pytest.raises(IdRangeError, match=rf"table 't0' takes value {wrong} which.* \[0, 7\)"):
        planned(group, [other, small], LRS[:2])


def test_records_follow_the_learning_rates() -> None:
    group = make_group(configs(2, "table"), 2)
    before = group.templates([0.5, 0.25])
    assert group.templates([0.5, 0.25]) is before
    assert group.templates([0.5, 1.0]) is not before
