"""The control block survives a floating-point sum, in every dtype that gradients have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ddp.agree.control import ControlLayout, ControlRow, Flag

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
U32 = st.integers(0, 2**32 - 1)
WEIGHTS = st.floats(0.0, 1e300, allow_nan=False)


def rows(buckets: int) -> st.SearchStrategy[ControlRow | None]:
    flags = st.integers(0, 15).map(lambda bits: bits | Flag.PRESENT.value)
    late = st.tuples(*[U32] * buckets)
    return st.none() | st.builds(ControlRow, flags, U32, WEIGHTS, late, U32)


@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 5))
def test_every_row_arrives_unchanged(
    data: st.DataObject, dtype: torch.dtype, world: int, buckets: int
) -> None:
    sent = data.draw(st.lists(rows(buckets), min_size=world, max_size=world))
    layout = ControlLayout(world, buckets)
    total = torch.zeros(layout.numel, dtype=dtype)
    for rank, row in enumerate(sent):
        trailer = torch.zeros(layout.numel, dtype=dtype)
        if row is not None:
            layout.write(trailer, rank, row)
        total += trailer
    block = layout.read(total)
    assert [row and (row.flags, row.step, row.weight, row.drift) for row in block.rows] == [
        row and (row.flags, row.step, row.weight, row.drift) for row in sent
    ]
    present = [(rank, row) for rank, row in enumerate(sent) if row is not None]
    assert [rank for rank, _ in block.present()] == [rank for rank, _ in present]
    for bucket in range(buckets):
        late = [(row.ready_us[bucket], rank) for rank, row in present]
        assert block.last_rank(bucket) == (max(late)[1] if late else -1)
    for flag in Flag:
        assert block.any(flag) == any(row.flags & flag.value for _, row in present)


@pytest.mark.parametrize("dtype", DTYPES)
def test_used_parameters_are_counted(dtype: torch.dtype) -> None:
    layout = ControlLayout(world=3, buckets=1, tracked=4)
    total = torch.zeros(layout.numel, dtype=dtype)
    row = ControlRow(Flag.PRESENT.value, 0, 0.0, (0,))
    for rank, used in enumerate(([1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0])):
        trailer = torch.zeros(layout.numel, dtype=dtype)
        layout.write(trailer, rank, row, bytes(used))
        total += trailer
    assert layout.read(total).used == (3, 0, 1, 1)


def test_a_use_is_never_rounded_away() -> None:
    """bfloat16 cannot count 1000 ranks, but tells none from one."""
    layout = ControlLayout(world=1, buckets=1, tracked=2)
    total = torch.zeros(layout.numel, dtype=torch.bfloat16)
    for _ in range(1000):
        total[-1] += 1
    assert layout.read(total).used[0] == 0
    assert layout.read(total).used[1] > 0


def test_stamps_out_of_range_are_clamped() -> None:
    layout = ControlLayout(world=1, buckets=2)
    trailer = torch.zeros(layout.numel)
    layout.write(trailer, 0, ControlRow(Flag.PRESENT.value, 2**40 + 5, 1.5, (-3, 2**50)))
    block = layout.read(trailer)
    assert layout.ready_us(block.data, 0) == (0, 2**32 - 1)
    assert block.rows[0] is not None
    assert block.rows[0].step == 5
