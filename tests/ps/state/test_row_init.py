"""First values: a function of seed, name and id, with the distribution that was asked for."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from paceline.ps.protocol.table_spec import Init, Start
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state.row_init import first_rows

NORMAL = Init()
UNIFORM = Init(Start.UNIFORM, -0.25, 0.5)
PINNED = [
    [-0.6797342896461487, 1.1862684488296509, -1.460611343383789],
    [-1.6670291423797607, -0.8215750455856323, -1.294048547744751],
]


@pytest.mark.parametrize("init", [NORMAL, UNIFORM, Init(Start.CONSTANT, 3.0)])
@pytest.mark.parametrize("dim", [1, 2, 7, 64, 40_000])
def test_depends_on_the_id_alone(init: Init, dim: int) -> None:
    ids = np.array([0, 5, 1 << 39, 7])
    together = first_rows(init, "t", dim, Dtype.FLOAT32, ids)
    for line, one in enumerate(ids):
        assert torch.equal(
            first_rows(init, "t", dim, Dtype.FLOAT32, np.array([one]))[0], together[line]
        )


def test_another_seed_or_name_is_something_else() -> None:
    ids = np.arange(10)
    found = [
        first_rows(Init(seed=0), "a", 8, Dtype.FLOAT32, ids),
        first_rows(Init(seed=1), "a", 8, Dtype.FLOAT32, ids),
        first_rows(Init(seed=0), "b", 8, Dtype.FLOAT32, ids),
    ]
    assert len({tuple(each.flatten().tolist()) for each in found}) == 3
    assert len({tuple(row.tolist()) for row in found[0]}) == 10


def test_these_bits_for_ever() -> None:
    """Rows that were never pushed are in no snapshot: their first values may never change."""
    found = first_rows(Init(seed=3), "t", 3, Dtype.FLOAT32, np.array([0, 12345]))
    assert found.tolist() == PINNED


def test_normal() -> None:
    """Quantiles within what a million values scatter by themselves."""
    values = first_rows(Init(Start.NORMAL, 1.0, 2.0), "t", 64, Dtype.FLOAT64, np.arange(16_384))
    flat = ((values - 1.0) / 2.0).flatten().sort().values
    n, exact = len(flat), statistics.NormalDist()
    assert abs(flat.mean()) < 5 / n**0.5
    assert abs(flat.std() - 1) < 5 / (2 * n) ** 0.5
    for share in (0.0001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999):
        want = exact.inv_cdf(share)
        error = (share * (1 - share) / n) ** 0.5 / exact.pdf(want)
        assert abs(flat[int(share * n)] - want) < 5 * error + 1e-3
    assert flat.abs().max() < 4.4
    rows = values[:, :-1].flatten() - 1.0
    following = values[:, 1:].flatten() - 1.0
    assert abs((rows * following).mean() / 4.0) < 5 / n**0.5, "neighbours do not know each other"


def test_uniform() -> None:
    values = first_rows(UNIFORM, "t", 64, Dtype.FLOAT32, np.arange(16_384)).double()
    assert values.min() >= -0.25
    assert values.max() < 0.5
    assert abs(values.mean() - 0.125) < 5 * 0.75 / (12 * values.numel()) ** 0.5


def test_half_is_rounded_from_single() -> None:
    ids = np.arange(5)
    single = first_rows(NORMAL, "t", 16, Dtype.FLOAT32, ids)
    assert torch.equal(first_rows(NORMAL, "t", 16, Dtype.BFLOAT16, ids), single.bfloat16())
