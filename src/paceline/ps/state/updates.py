"""What a push does to rows: the optimizers, on gathered rows, with torch's operations.

Called by ``ps/state/table.py`` with rows, state and gradient of the rows of one push, one line for
each row. Each function changes rows and state in place, by the same operations in the same order as
``torch.optim`` does it for a whole table, so that the bits are the same
(``tests/ps/state/test_updates.py`` compares them). Must not know where rows are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.ps.protocol.optimizers import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Dtype


@dataclass(frozen=True)
class StateColumn:
    """One kind of optimizer state that each row has.

    Args:
        name: As it is called in files.
        width: How many values a row has.
        dtype: Of these.
        start: What they begin with.
    """

    name: str
    width: int
    dtype: torch.dtype
    start: float


def state_columns(spec: TableSpec, dtype: torch.dtype) -> tuple[StateColumn, ...]:
    """What the table's optimizer keeps for each row, in the order its update takes it."""
    optimizer = spec.optimizer
    if isinstance(optimizer, Adagrad):
        return (StateColumn("sum", spec.dim, dtype, optimizer.initial_accumulator_value),)
    if isinstance(optimizer, RowwiseAdagrad):
        # A sum over a whole training does not fit into 11 bits.
        wide = torch.float64 if spec.dtype is Dtype.FLOAT64 else torch.float32
        return (StateColumn("sum", 1, wide, optimizer.initial_accumulator_value),)
    if isinstance(optimizer, Adam):
        means = ("exp_avg", "exp_avg_sq")
        return tuple(StateColumn(name, spec.dim, dtype, 0.0) for name in means)
    return ()


def update(
    optimizer: Optimizer,
    rows: Tensor,
    state: tuple[Tensor, ...],
    grad: Tensor,
    lr: float,
    step: int,
) -> None:
    """Apply one push to gathered rows and their state, in place.

    Args:
        optimizer: The table's.
        rows: One line for each row that has a gradient.
        state: As ``state_columns`` names it, lines as in ``rows``.
        grad: Lines as in ``rows``.
        lr: Of this push.
        step: The number of this push to the table, from 1.
    """
    _UPDATES[type(optimizer)](optimizer, rows, state, grad, lr, step)


def _sgd(_: SGD, rows: Tensor, state: tuple[()], grad: Tensor, lr: float, step: int) -> None:
    rows.add_(grad, alpha=-lr)


def _adagrad(
    policy: Adagrad, rows: Tensor, state: tuple[Tensor], grad: Tensor, lr: float, step: int
) -> None:
    (sums,) = state
    sums.addcmul_(grad, grad, value=1)
    rows.addcdiv_(grad, sums.sqrt().add_(policy.eps), value=-lr)


def _rowwise_adagrad(
    policy: RowwiseAdagrad, rows: Tensor, state: tuple[Tensor], grad: Tensor, lr: float, step: int
) -> None:
    (sums,) = state
    wide = grad.to(sums.dtype)
    sums.add_(wide.square().mean(dim=1, keepdim=True))
    rows.add_(wide.div_(sums.sqrt().add_(policy.eps)).to(rows.dtype), alpha=-lr)


def _adam(
    policy: Adam, rows: Tensor, state: tuple[Tensor, Tensor], grad: Tensor, lr: float, step: int
) -> None:
    mean, mean_sq = state
    beta1, beta2 = policy.betas
    mean.add_(grad.sub(mean).mul_(1 - beta1))
    mean_sq.add_(grad.pow(2).sub_(mean_sq).mul_(1 - beta2))
    size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    rows.add_(-size * mean.div(mean_sq.sqrt().add_(policy.eps)))


_UPDATES: dict[type[Optimizer], Callable[..., Any]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    RowwiseAdagrad: _rowwise_adagrad,
    Adam: _adam,
}
