"""The optimizers in C: torch's bits for every size and setting, or torch itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import ps
from paceline.native import extension
from paceline.ps.protocol.optimizers import Optimizer
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.protocol.wire import Dtype
from paceline.ps.state import native_updates
from paceline.ps.state.native_updates import is_exact, rounding_of
from paceline.ps.state.table import MemoryBudget, Table
from tests.examples import examples

pytestmark = pytest.mark.skipif(extension.native is None, reason="there is no native core")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a server: two threads would add up one long row in two parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIMIZERS = [ps.SGD(), ps.Adagrad(), ps.RowwiseAdagrad(), ps.Adam()]


def named(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=named)
def test_every_width_has_torch_s_bits(optimizer: Optimizer) -> None:
    rounding = rounding_of(TableSpec("t", 1, 1, optimizer=optimizer))
    assert rounding is not None, "no way of rounding gives the bits of this torch"
    widths = [*range(1, 140), 255, 256, 300, 511, 512, 513, 1000, 1024, 4096, 5000, 40_000]
    wrong = [dim for dim in widths if not is_exact(optimizer, rounding, dim, 1 + 4096 // dim % 9)]
    assert not wrong


betas = st.tuples(*[st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999])] * 2)
eps = st.sampled_from([0.0, 1e-10, 1e-8, 1e-3, 1.0])
starts = st.sampled_from([0.0, 0.1, 3.0])
optimizers = st.one_of(
    st.builds(ps.SGD),
    st.builds(ps.Adagrad, eps=eps.filter(bool), initial_accumulator_value=starts),
    st.builds(ps.RowwiseAdagrad, eps=eps.filter(bool), initial_accumulator_value=starts),
    st.builds(ps.Adam, betas=betas, eps=eps.filter(bool)),
)


@settings(max_examples=examples(150))
@given(optimizers, st.integers(1, 200), st.integers(1, 40))
def test_every_setting_has_torch_s_bits(optimizer: Optimizer, dim: int, rows: int) -> None:
    rounding = rounding_of(TableSpec("t", 1, 1, optimizer=optimizer))
    assert rounding is not None
    assert is_exact(optimizer, rounding, dim, rows)


def test_other_bits_leave_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit, or a machine that cannot, and torch does the updates."""
    spec = TableSpec("t", 4, 4, optimizer=ps.SGD(0.123))
    monkeypatch.setattr(extension, "native", SimpleNamespace(update_rows=lambda *_: False))
    native_updates._found.cache_clear()
    assert rounding_of(spec) is None
    monkeypatch.undo()

    def off_by_one_bit(entry: bytearray, slots: object, grad: np.ndarray, lr: float) -> bool:
        grad = grad.copy()
        grad.view(np.int32)[0, 0] ^= 1
        return bool(extension_native.update_rows(entry, slots, grad, lr))

    extension_native = extension.native
    monkeypatch.setattr(extension, "native", SimpleNamespace(update_rows=off_by_one_bit))
    native_updates._found.cache_clear()
    assert rounding_of(TableSpec("t", 4, 4, optimizer=ps.SGD(0.321))) is None
    native_updates._found.cache_clear()


def test_other_dtypes_are_torch_s() -> None:
    assert rounding_of(TableSpec("t", 4, 4, Dtype.FLOAT64)) is None


def table_of(optimizer: Optimizer) -> Table:
    spec = TableSpec("t", 50, 8, optimizer=optimizer, padding_idx=3)
    return Table(0, spec, Shard(Sharding.TABLE, 0, 1), MemoryBudget(1 << 20))


def test_slots_and_gradients_are_compared_with_the_table() -> None:
    table = table_of(ps.Adagrad())
    ids = np.arange(5)
    slots = table.materialise(ids, table.locate(ids))
    grad = np.zeros((1, 8), np.float32)
    update_rows = extension.native.update_rows
    for slot in (-2, 51, 2**31 - 1):
        assert not update_rows(table.entry.raw, np.array([slot], np.int32), grad, 0.1)
    assert not update_rows(table.entry.raw, slots, grad, 0.1), "five slots, one gradient"
    assert not update_rows(bytearray(10), slots[:1], grad, 0.1)
    assert table.step == 0
    assert update_rows(table.entry.raw, slots[:1], grad, 0.1)
    assert table.step == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=named)
def test_tables_are_pushed_natively_as_by_torch(optimizer: Optimizer) -> None:
    """Padding, new rows, no rows, and a gradient that begins anywhere among them."""
    mine = table_of(optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "native", None)
        torchs = table_of(optimizer)
    assert (mine.entry.is_native, torchs.entry.is_native) == (True, False)
    generator = torch.Generator().manual_seed(0)
    for size in (6, 0, 20, 1, 50):
        ids = torch.randperm(50, generator=generator)[:size].numpy()
        raw = bytearray(b"x") + torch.randn(size, 8, generator=generator).numpy().tobytes()
        grad = torch.empty(0, 8)
        if size:
            grad = torch.frombuffer(raw, dtype=torch.float32, offset=1).view(size, 8)
        for table in (mine, torchs):
            table.push(ids, table.locate(ids), grad, 0.1)
    assert mine.step == torchs.step == 5
    for found, expected in zip(mine.storage.kept(), torchs.storage.kept(), strict=True):
        assert torch.equal(found, expected)
