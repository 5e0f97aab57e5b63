"""Errors of ``paceline.ps`` have the phrase of torch's embeddings and optimizers: both are raised.

No server is needed: all of it is found before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline import ps
from paceline.ps.client.batch import flat_bags
from paceline.ps.client.row_plan import Layout
from paceline.ps.modules.base import checked_rows
from paceline.ps.protocol.table_spec import Sharding
from tests.test_phrases import check, error_of

IDS, ZERO = torch.tensor([1, 2]), torch.tensor([0])
ROWS = 5


class Both(NamedTuple):
    phrase: str
    ours: Callable[[], Any]
    torchs: Callable[[], Any]


def bags(phrase: str, *arguments: Tensor | None, **options: Any) -> Both:
    config = {"mode": "mean", **options}
    return Both(
        phrase,
        lambda: flat_bags(ps.TableConfig("t", ROWS, 2, **config), ps.Bags(*arguments)),  # type: ignore[arg-type]
        lambda: nn.EmbeddingBag(ROWS, 2, **config)(*arguments),
    )


def optimizer(phrase: str, ours: Any, torchs: Any, **options: Any) -> Both:
    parameters = [nn.Parameter(torch.ones(2))]
    return Both(phrase, lambda: ours(**options), lambda: torchs(parameters, **options))


def planned(ids: Tensor) -> None:
    Layout(["t"], [ROWS], Sharding.HASH, 1, [0]).find([ids.numpy()])


CASES = {
    "offsets beside lines": bags("if input is 2D, then offsets has to be None", IDS[None], ZERO),
    "three dimensions": bags(
        "input has to be 1D or 2D Tensor, but got Tensor of dimension 3", IDS[None, None]
    ),
    "no offsets": bags("offsets has to be a 1D Tensor but got None", IDS),
    "offsets in lines": bags("offsets has to be a 1D Tensor", IDS, ZERO[None]),
    "first offset": bags("offsets[0] has to be 0", IDS, torch.tensor([1])),
    "last offset": bags(
        "offsets[-1] can not be greater than input's length 2 but got offsets[-1] of 9",
        IDS,
        torch.tensor([0, 9]),
    ),
    "no last offset": bags(
        "include_last_offset: number of offset should be at least 1",
        IDS,
        ZERO[:0],
        include_last_offset=True,
    ),
    "ids that are no integers": bags(
        "to have one of the following scalar types: Long, Int; but got torch.FloatTensor instead",
        IDS.float(),
        ZERO,
    ),
    "shape of weights": bags(
        "If per_sample_weights (torch.Size([3])) is not None, then it must have the same shape as "
        "the input (torch.Size([2]))",
        IDS,
        ZERO,
        torch.ones(3),
        mode="sum",
    ),
    "dtype of weights": bags(
        "to have the same type as tensor for argument #1 'per_sample_weights'; but",
        IDS,
        ZERO,
        torch.ones(2).double(),
        mode="sum",
    ),
    "weights without sum": bags(
        "per_sample_weights is only supported for mode='sum' (got mode='mean')",
        IDS,
        ZERO,
        torch.ones(2),
    ),
    "mode": bags("mode has to be one of sum, mean or max", IDS, ZERO, mode="median"),
    "max by frequency": bags(
        "max mode does not support scaling the gradient by the frequency",
        IDS,
        ZERO,
        mode="max",
        scale_grad_by_freq=True,
    ),
    "sparse max": bags(
        "max mode does not support sparse weights", IDS, ZERO, mode="max", sparse=True
    ),
    "padding": Both(
        "padding_idx must be within num_embeddings",
        lambda: ps.TableConfig("t", ROWS, 2, padding_idx=9),
        lambda: nn.EmbeddingBag(ROWS, 2, padding_idx=9),
    ),
    "rows": Both(
        "Embeddings parameter is expected to be 2-dimensional",
        lambda: checked_rows(torch.ones(3)),
        lambda: nn.Embedding.from_pretrained(torch.ones(3)),
    ),
    "id": Both(
        "index out of range in self",
        lambda: planned(torch.tensor([7])),
        lambda: nn.Embedding(ROWS, 2)(torch.tensor([7])),
    ),
    "id in a bag": Both(
        "takes value 7 which is not in the valid range [0, 5)",
        lambda: planned(torch.tensor([7])),
        lambda: nn.EmbeddingBag(ROWS, 2)(torch.tensor([[7]])),
    ),
    "learning rate": optimizer("Invalid learning rate: -1.0", ps.SGD, torch.optim.SGD, lr=-1.0),
    "eps": optimizer("Invalid epsilon value: -1.0", ps.Adagrad, torch.optim.Adagrad, eps=-1.0),
    "accumulator": optimizer(
        "Invalid initial_accumulator_value value: -1.0",
        ps.Adagrad,
        torch.optim.Adagrad,
        initial_accumulator_value=-1.0,
    ),
    "first beta": optimizer(
        "Invalid beta parameter at index 0: 1.0", ps.Adam, torch.optim.SparseAdam, betas=(1.0, 0.9)
    ),
    "second beta": optimizer(
        "Invalid beta parameter at index 1: 1.0", ps.Adam, torch.optim.SparseAdam, betas=(0.9, 1.0)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_has_the_phrase_of_torch(name: str) -> None:
    case = CASES[name]
    check(case.phrase, error_of(case.ours), error_of(case.torchs))
