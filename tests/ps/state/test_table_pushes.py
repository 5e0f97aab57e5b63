"""Tables that are pushed in one message, or in blocks, have the bits of those pushed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline import ps
from paceline.ps.protocol.optimizers import Optimizer
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Head, Kind, unpack
from paceline.ps.server.dispatch import Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state import table
from paceline.ps.state.store import Store
from tests.ps.raw_client import attach_frames, rows_frames, values_of

pytestmark = pytest.mark.usefixtures("either_way")

CLIENT = b"c" * 16
OPTIMIZERS = [ps.SGD(0.1), ps.Adagrad(0.1), ps.RowwiseAdagrad(0.1), ps.Adam(0.1)]


class Local:
    """A store without a socket; counts its messages."""

    def __init__(self, specs: list[TableSpec]) -> None:
        self.store = Store(1 << 30, 1 << 30)
        self.handler = Handler(self.store, None, SaveRoot(None))
        self._sequence = 0
        self.specs = specs
        for spec in specs:
            self.do(attach_frames(self.next(Kind.ATTACH), spec))

    def next(self, kind: Kind) -> Head:
        self._sequence += 1
        return Head(kind, 1, CLIENT, self._sequence)

    def do(self, frames: list) -> None:
        answer = unpack(self.handler.answer(frames))
        assert answer.head.kind is Kind.DONE, answer.control

    def push(self, parts: list[tuple[int, np.ndarray, torch.Tensor, float]]) -> None:
        described = [(n, self.specs[n], ids, grad, lr) for n, ids, grad, lr in parts]
        self.do(rows_frames(self.next(Kind.PUSH), described))

    def rows(self, number: int) -> torch.Tensor:
        spec = self.specs[number]
        ids = range(spec.rows)
        frames = rows_frames(Head(Kind.LOOKUP, 1, CLIENT), [(number, spec, ids, None, 0.0)])
        return values_of(unpack(self.handler.answer(frames)), spec, spec.rows)


def parts_of(
    specs: list[TableSpec], seed: int
) -> list[tuple[int, np.ndarray, torch.Tensor, float]]:
    chance = np.random.default_rng(seed)
    found = []
    for number, spec in enumerate(specs):
        ids = np.sort(chance.choice(spec.rows, size=int(chance.integers(0, 30)), replace=False))
        grad = torch.from_numpy(chance.normal(size=(len(ids), spec.dim))).float()
        found.append((number, ids, grad, 0.1 if number < 4 else 0.2))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_together_is_one_by_one(optimizer: Optimizer) -> None:
    """Unequal shapes, an odd number of bytes, padding and two learning rates among them."""
    dims = [8, 8, 8, 3, 8, 8]
    specs = [
        TableSpec(f"t{n}", 50, dim, optimizer=optimizer, padding_idx=7 if n == 2 else None)
        for n, dim in enumerate(dims)
    ]
    together_, alone = Local(specs), Local(specs)
    for seed in range(6):
        parts = parts_of(specs, seed)
        together_.push(parts)
        for part in parts:
            alone.push([part])
    for number in range(len(specs)):
        assert torch.equal(together_.rows(number), alone.rows(number)), number
        assert together_.store.stats(number, number + 1)[0]["pushes"] == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_blocks_are_the_whole(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TableSpec("t", 500, 8, optimizer=optimizer)
    grad = torch.randn(300, 8)
    ids = np.sort(np.random.default_rng(0).choice(500, 300, replace=False))
    whole, blocks = Local([spec]), Local([spec])
    for _ in range(3):
        whole.push([(0, ids, grad, 0.1)])
    monkeypatch.setattr(table, "BLOCK_BYTES", 7 * 32)
    for _ in range(3):
        blocks.push([(0, ids, grad, 0.1)])
    assert torch.equal(whole.rows(0), blocks.rows(0))
    assert blocks.store.tables[0].step == 3
    assert blocks.store.tables[0].count == 300
