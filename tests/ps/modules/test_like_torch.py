"""``ps.Embedding`` and ``ps.EmbeddingBag`` beside torch's: outputs and updates, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # the first optimizer step would, and change the environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import ps
from tests.examples import examples
from tests.ps.modules.tables import DIM, LR, ROWS, gradient_like, names

pytestmark = pytest.mark.usefixtures("every_byte_counts")


@dataclass(frozen=True)
class Case:
    """One call of an EmbeddingBag."""

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    options: dict[str, object]
    sharding: str
    pooling: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    options: dict[str, object] = {"mode": mode}
    if draw(st.booleans()):
        options["padding_idx"] = draw(st.integers(-ROWS, ROWS - 1))
    if draw(st.booleans()):
        options["max_norm"] = draw(st.sampled_from([0.5, 2.0]))
        options["norm_type"] = draw(st.sampled_from([1.0, 2.0]))
    if mode != "max" and draw(st.booleans()):
        options["scale_grad_by_freq"] = True
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    offsets = None
    if draw(st.booleans()):
        shape: tuple[int, ...] = (draw(st.integers(0, 4)), draw(st.integers(1, 5)))
    else:
        shape = (draw(st.integers(0, 20)),)
        cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=5)))
        if draw(st.booleans()):
            options["include_last_offset"] = True
            cuts.append(shape[0])
        offsets = torch.tensor([0, *cuts], dtype=dtype)
    size = torch.Size(shape).numel()
    flat = draw(st.lists(st.integers(0, ROWS - 1), min_size=size, max_size=size))
    ids = torch.tensor(flat, dtype=dtype).view(shape)
    weights = None
    if mode == "sum" and draw(st.booleans()):
        weights = torch.rand(shape, generator=torch.Generator().manual_seed(size))
        weights.requires_grad_(draw(st.booleans()))
    if weights is not None:
        options.pop("scale_grad_by_freq", None)
    sharding = draw(st.sampled_from(["hash", "range", "table"]))
    pooling = draw(st.sampled_from(["auto", "trainer"]))
    return Case(ids, offsets, weights, options, sharding, pooling)


@settings(
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases())
def test_embedding_bag_is_torchs(servers: ps.Servers, case: Case) -> None:
    check_like_torch(servers, case)


def check_like_torch(servers: ps.Servers, case: Case) -> None:
    """Two steps with SGD, here and in torch."""
    remote = ps.EmbeddingBag(
        ROWS,
        DIM,
        servers=servers,
        name=next(names),
        optimizer=ps.SGD(LR),
        sharding=case.sharding,
        pooling=case.pooling,
        **case.options,  # type: ignore[arg-type]
    )
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    remote.write(torch.arange(ROWS), start)
    local = nn.EmbeddingBag(ROWS, DIM, **case.options)  # type: ignore[arg-type]
    local.weight.data.copy_(start)
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    theirs = None if case.weights is None else case.weights.detach().clone()
    if theirs is not None and case.weights is not None:
        theirs.requires_grad_(case.weights.requires_grad)
    for _ in range(2):
        expected = local(case.ids, case.offsets, theirs)
        found = remote(case.ids, case.offsets, case.weights)
        assert torch.equal(found, expected)
        expected.backward(gradient_like(expected))
        found.backward(gradient_like(found))
        optimizer.step()
        optimizer.zero_grad()
    if theirs is not None and case.weights is not None and theirs.grad is not None:
        assert case.weights.grad is not None
        assert torch.equal(case.weights.grad, theirs.grad)
    assert torch.equal(remote.rows(torch.arange(ROWS)), _renormed(local))


def _renormed(local: nn.EmbeddingBag) -> Tensor:
    """What a lookup of every row gives: with max_norm, rows that fit."""
    rows = local.weight.detach().clone()
    if local.max_norm is not None:
        torch.embedding_renorm_(rows, torch.arange(ROWS), local.max_norm, local.norm_type)
    return rows


@pytest.mark.parametrize("pooling", ["auto", "trainer"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_padding_that_no_bag_has(servers: ps.Servers, mode: str, pooling: str) -> None:
    """It leads torch to other bits all the same, in one of two sums of three weighted rows."""
    options: dict[str, object] = {"mode": mode, "padding_idx": 0}
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, ROWS, (6,), generator=random)
        weights = torch.rand(6, generator=random) if mode == "sum" else None
        case = Case(ids, torch.tensor([0, 4]), weights, options, "table", pooling)
        check_like_torch(servers, case)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0), (2, 2, 2)])
@pytest.mark.parametrize("sharding", ["hash", "table"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"max_norm": 1.0}, {"sparse": True}])
def test_embedding_is_torchs(
    servers: ps.Servers, shape: tuple[int, ...], sharding: str, options: dict[str, object]
) -> None:
    remote = ps.Embedding(
        ROWS,
        DIM,
        servers=servers,
        name=next(names),
        optimizer=ps.SGD(LR),
        sharding=sharding,
        **options,  # type: ignore[arg-type]
    )
    local = nn.Embedding(ROWS, DIM, **(options | {"sparse": False}))  # type: ignore[arg-type]
    remote.write(torch.arange(ROWS), local.weight.detach())
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    ids = torch.randint(4, shape, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        expected, found = local(ids), remote(ids)
        assert torch.equal(found, expected)
        expected.backward(gradient_like(expected))
        found.backward(gradient_like(found))
        optimizer.step()
        optimizer.zero_grad()
    used = torch.unique(ids)
    if "max_norm" in options:
        torch.embedding_renorm_(local.weight.data, used, 1.0, 2.0)
    assert torch.equal(remote.rows(used), local.weight.detach()[used])
