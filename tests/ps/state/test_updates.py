"""The optimizers of a server, bit for bit those of torch on the rows that have a gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline import ps
from paceline.ps.protocol.optimizers import Optimizer
from paceline.ps.protocol.table_spec import Init, Shard, Sharding, Start, TableSpec
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state.table import MemoryBudget, Table

ROWS = 50
WHOLE = Shard(Sharding.TABLE, 0, 1)

# The first step of a torch optimizer imports its compiler, which sets a variable.
pytestmark = pytest.mark.may_leave("environ")

# Ours, and torch's with the same settings. Dense gradients have zeros where no row was touched.
PAIRS: dict[str, tuple[Optimizer, Callable[[list[torch.Tensor]], torch.optim.Optimizer], bool]] = {
    "sgd": (ps.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1), False),
    "adagrad": (ps.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1), False),
    "adagrad-start": (
        ps.Adagrad(0.1, eps=1e-6, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-6, initial_accumulator_value=0.5),
        False,
    ),
    "adam": (
        ps.Adam(0.01, betas=(0.8, 0.99), eps=1e-6),
        lambda p: torch.optim.SparseAdam(p, 0.01, betas=(0.8, 0.99), eps=1e-6),
        True,
    ),
}
DTYPES = {torch.float32: Dtype.FLOAT32, torch.float64: Dtype.FLOAT64}


def make(optimizer: Optimizer, dim: int, dtype: torch.dtype = torch.float32, **kw: object) -> Table:
    spec = TableSpec("t", ROWS, dim, DTYPES[dtype], optimizer, **kw)  # type: ignore[arg-type]
    return Table(0, spec, WHOLE, MemoryBudget(1 << 30))


def push(table: Table, ids: np.ndarray, grad: torch.Tensor, lr: float) -> None:
    table.push(ids, table.locate(ids), grad, lr)


def read(table: Table, ids: np.ndarray) -> torch.Tensor:
    out = np.empty(len(ids), table.raw_dtype)
    table.read(ids, table.locate(ids), out)
    return torch.frombuffer(out, dtype=table.dtype).view(len(ids), table.spec.dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("name", PAIRS)
def test_bits_are_torchs(name: str, dim: int, dtype: torch.dtype) -> None:
    ours, make_theirs, is_sparse = PAIRS[name]
    table = make(ours, dim, dtype)
    every = np.arange(ROWS)
    weight = torch.nn.Parameter(read(table, every).clone())
    theirs = make_theirs([weight])
    chance = np.random.default_rng(dim)
    for step in range(12):
        ids = np.sort(chance.choice(ROWS, size=int(chance.integers(1, 20)), replace=False))
        grad = torch.from_numpy(chance.normal(size=(len(ids), dim))).to(dtype)
        lr = ours.lr * (1 + step)
        theirs.param_groups[0]["lr"] = lr
        where = torch.from_numpy(ids)
        if is_sparse:
            weight.grad = torch.sparse_coo_tensor(
                where[None], grad, weight.shape, check_invariants=True
            )
        else:
            weight.grad = torch.zeros_like(weight).index_copy(0, where, grad)
        theirs.step()
        push(table, ids, grad, lr)
        assert torch.equal(read(table, every), weight.detach()), f"step {step}"


def test_adam_counts_pushes_without_rows() -> None:
    """A push of other rows of the table is a step for these, too: torch counts steps."""
    ours = make(ps.Adam(0.1), 4)
    every = np.arange(ROWS)
    weight = torch.nn.Parameter(read(ours, every).clone())
    theirs = torch.optim.SparseAdam([weight], 0.1)
    for rows in ([1], [], [1]):
        ids = np.array(rows, np.int64)
        grad = torch.ones(len(rows), 4)
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64), grad, weight.shape, check_invariants=True
        )
        theirs.step()
        push(ours, ids, grad, 0.1)
    assert torch.equal(read(ours, every), weight.detach())


def test_rowwise_adagrad_is_what_its_docstring_says() -> None:
    table = make(ps.RowwiseAdagrad(0.1, eps=1e-3, initial_accumulator_value=0.2), 8)
    ids = np.array([3, 4])
    rows = read(table, ids).clone()
    sums = torch.full((2,), 0.2)
    for _ in range(5):
        grad = torch.randn(2, 8)
        sums += grad.square().mean(1)
        rows -= 0.1 * grad / (sums.sqrt() + 1e-3)[:, None]
        push(table, ids, grad, 0.1)
    torch.testing.assert_close(read(table, ids), rows)


def test_padding_row_never_moves() -> None:
    table = make(ps.Adagrad(0.1, eps=0.0), 4, padding_idx=3)
    ids = np.array([2, 3])
    assert read(table, ids)[1].tolist() == [0.0] * 4
    push(table, ids, torch.ones(2, 4), 0.1)
    after = read(table, ids)
    assert after[1].tolist() == [0.0] * 4
    assert table.count == 2


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_max_norm_is_torchs(norm_type: float) -> None:
    """A lookup reads scaled copies; the push that follows scales what is stored, then updates."""
    table = make(ps.SGD(0.1), 8, max_norm=1.5, norm_type=norm_type)
    plain = make(ps.SGD(0.1), 8)
    ids = np.array([0, 7, 9])
    weight = torch.nn.Parameter(read(plain, np.arange(ROWS)).clone())
    assert table.count == 0
    for _ in range(4):
        found = torch.nn.functional.embedding(
            torch.from_numpy(ids), weight, max_norm=1.5, norm_type=norm_type
        )
        assert torch.equal(read(table, ids), found.detach())
        grad = torch.randn(3, 8)
        found.backward(grad)
        assert weight.grad is not None
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.1)
        weight.grad = None
        push(table, ids, grad, 0.1)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
@pytest.mark.parametrize("optimizer", [ps.SGD(0.1), ps.Adagrad(0.1), ps.RowwiseAdagrad(0.1)])
def test_half_precision(optimizer: Optimizer, dtype: Dtype) -> None:
    spec = TableSpec("t", ROWS, 16, dtype, optimizer, Init(Start.CONSTANT, 1.0))
    table = Table(0, spec, WHOLE, MemoryBudget(1 << 30))
    ids = np.array([1, 2])
    push(table, ids, torch.ones(2, 16, dtype=table.dtype), 0.1)
    after = read(table, ids).float()
    torch.testing.assert_close(after, torch.full((2, 16), 0.9), atol=0.01, rtol=0)
