"""Parity with the plain module over drawn models, batches and numbers of replicas."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import paceline
from paceline.containers import tensors_in
from tests.examples import examples

SETTINGS = settings(max_examples=examples(40))
WIDTH = 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).sin()


class Steps(nn.Module):
    """A buffer that counts in place, one that is assigned, and one that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("decay", torch.ones((), dtype=torch.double))
        self.register_buffer("scale", torch.full((), 0.5, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.decay = self.decay * 0.9
        return x * self.scale * self.decay


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "residual": Residual,
    "steps": Steps,
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "batch norm, eval": lambda: nn.BatchNorm1d(WIDTH).eval(),
}
models = st.lists(st.sampled_from(sorted(LAYERS)), min_size=0, max_size=4)
sizes = st.integers(1, 9)
replicas = st.integers(1, 4)


def build(names: list[str]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(LAYERS[name]() for name in names)).double()


def batch(rows: int, *, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, dtype=torch.double, generator=generator)
    return x.requires_grad_(requires_grad)


def step(model: nn.Module, x: torch.Tensor, *, twice: bool) -> list[torch.Tensor | None]:
    """The loss's gradients; ``twice``: those of a penalty on the slope, too."""
    x = x.detach().requires_grad_(x.requires_grad or twice)
    output = model(x)
    loss = output.pow(2).sum()
    if twice:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.pow(2).sum()
    if loss.requires_grad:
        loss.backward()
    found = [output.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [None if t is None else t.clone() for t in found]


@SETTINGS
@given(names=models, rows=sizes, count=replicas, inputs=st.booleans(), twice=st.booleans())
def test_equals_the_plain_module(
    names: list[str], rows: int, count: int, inputs: bool, twice: bool
) -> None:
    model = build(names)
    plain = build(names)
    parallel = paceline.DataParallel(model, ["cpu"] * count)
    x = batch(rows, requires_grad=inputs)
    for _ in range(2):
        found, expected = step(parallel, x, twice=twice), step(plain, x, twice=twice)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@SETTINGS
@given(rows=st.integers(4, 12), count=st.integers(1, 3), steps=st.integers(1, 3))
def test_batch_norm_equals_plain_modules_on_the_pieces(rows: int, count: int, steps: int) -> None:
    """Each replica normalises its own piece; the first one's statistics stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    pieces = batch(rows).chunk(count)
    if min(len(piece) for piece in pieces) < 2:
        return
    plain = [copy.deepcopy(model) for _ in pieces]
    parallel = paceline.DataParallel(model, ["cpu"] * count)
    for _ in range(steps):
        with torch.no_grad():  # the others begin every forward with what the first has
            for other in plain[1:]:
                other.load_state_dict(plain[0].state_dict())
        expected = torch.cat([one(piece) for one, piece in zip(plain, pieces, strict=True)])
        torch.testing.assert_close(parallel(batch(rows)), expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain[0].named_buffers()))


leaves = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.text(max_size=2),
    st.integers(0, 2).map(lambda trailing: torch.arange(6 * 2.0**trailing).reshape(6, -1)),
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@SETTINGS
@given(nest=nests, count=replicas)
def test_gather_undoes_scatter(nest: Any, count: int) -> None:
    pieces = paceline.scatter(nest, ["cpu"] * count)
    whole = paceline.gather(pieces, "cpu")
    assert repr(whole) == repr(nest)
    for piece in pieces:
        shapes = [len(t) for t in tensors_in(piece)]
        assert all(size <= 6 for size in shapes)
    if any(True for _ in tensors_in(nest)):
        assert len(pieces) == len(torch.arange(6).chunk(count))
