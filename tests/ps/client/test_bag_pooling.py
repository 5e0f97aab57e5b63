"""Pooling of a group and its backward: the bits of each table's own ``F.embedding_bag``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from paceline import ps
from paceline.native.extension import native
from paceline.ps.client import message_plan as planner
from paceline.ps.client.bag_pooling import BagPooling
from paceline.ps.client.batch import FlatBags
from paceline.ps.client.message_parts import RowsPart
from tests.examples import examples
from tests.ps.groups import SHARDINGS, batches, make_group

ROWS = 40


def own(
    config: ps.TableConfig, bags: FlatBags, rows: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """What torch makes of one table by itself: the bags, and the gradient of its rows."""
    rows = rows.clone().requires_grad_()
    found = F.embedding_bag(
        bags.ids,
        rows,
        bags.offsets,
        mode=config.mode,
        per_sample_weights=bags.weights,
        scale_grad_by_freq=config.scale_grad_by_freq,
    )
    found.backward(gradient)
    assert rows.grad is not None
    return found.detach(), rows.grad


@pytest.mark.parametrize("core", [None, native], ids=["python", "native"])
@settings(max_examples=examples(150))
@given(st.data())
def test_a_group_has_the_bits_of_its_tables(core: Any, data: st.DataObject) -> None:
    draw = data.draw
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    is_weighted = mode == "sum" and draw(st.booleans())
    config = ps.TableConfig(
        "t",
        ROWS,
        draw(st.sampled_from([2, 6, 16, 30])),
        mode=mode,
        scale_grad_by_freq=mode != "max" and draw(st.booleans()),
        sharding=draw(st.sampled_from(SHARDINGS)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )
    configs = [config] * draw(st.integers(1, 4))
    inputs = draw(batches(configs, weights=is_weighted))
    group = make_group(configs, draw(st.integers(1, 3)), is_weighted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "native", core)
        plan = planner.planned(group, inputs, [0.1] * len(configs))
    torch.manual_seed(draw(st.integers(0, 9)))
    weights = [torch.randn(ROWS, config.embedding_dim, dtype=config.dtype) for _ in configs]
    pool = BagPooling(RowsPart(group, plan, inputs))
    found = plan.found
    table_of = torch.empty(plan.distinct, dtype=torch.int64)
    for table in range(len(configs)):
        table_of[torch.from_numpy(found.places(table))] = table
    rows = torch.stack(weights)[table_of, torch.from_numpy(found.ids)]
    outputs = pool.forward(rows)
    gradients = [torch.randn_like(each) for each in outputs]
    pieces = pool.backward(gradients)
    assert pieces is not None
    whole = bytearray().join(pieces)
    gradient = torch.empty_like(rows)
    if whole:
        gradient = torch.frombuffer(whole, dtype=config.dtype).view(rows.shape)
    for table, bags in enumerate(inputs):
        expected, grad = own(config, bags, weights[table], gradients[table])
        assert torch.equal(outputs[table], expected)
        mine = table_of == table
        ids = torch.from_numpy(found.ids)[mine]
        assert torch.equal(gradient[mine], grad[ids])
