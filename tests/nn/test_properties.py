"""SyncBatchNorm equals single-process BatchNorm over drawn shapes, batch sizes and options."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.nn.batch_stats import combine, local_stats
from tests.examples import examples
from tests.nn.compare import Case, assert_same_as_whole

shapes = st.one_of(
    st.tuples(st.integers(1, 5)),
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "affine": st.booleans(),
        "momentum": st.sampled_from([None, 0.0, 0.1, 0.9, 1.0]),
        "eps": st.sampled_from([1e-5, 1e-2]),
        "track_running_stats": st.booleans(),
    },
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes)
    # At least two values per channel over all ranks; torch refuses one, and so do we.
    sizes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(lambda s: sum(s) > 1))
    formats = [torch.contiguous_format]
    if len(shape) == 3:
        formats.append(torch.channels_last)
    return Case(
        sizes=tuple(sizes),
        shape=shape,
        dtype=torch.float64,
        module_dtype=torch.float64,
        memory_format=draw(st.sampled_from(formats)),
        steps=draw(st.integers(1, 3)),
        shift=draw(st.sampled_from([0.0, 3.0, 100.0])),
        seed=draw(st.integers(0, 9)),
        options=draw(options),
    )


@settings(max_examples=examples(20))
@given(cases())
def test_equals_batchnorm_on_the_concatenated_batch(case: Case) -> None:
    for result in assert_same_as_whole(case, rtol=1e-7, atol=1e-7):
        assert result.collectives == [(1, 1)] * case.steps


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda s: sum(s) > 0),
    shift=st.sampled_from([0.0, 10.0, 1000.0]),
)
def test_combined_statistics_are_those_of_all_values(sizes: list[int], shift: float) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    values = torch.randn(sum(sizes), 3, generator=generator) + shift
    rows = torch.stack([torch.cat(local_stats(piece)) for piece in values.split(sizes)])
    found = combine(rows)
    var, mean = torch.var_mean(values.double(), 0, correction=0)
    assert found.total.item() == sum(sizes)
    torch.testing.assert_close(found.mean, mean.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.var, var.float(), rtol=1e-3, atol=1e-4)
