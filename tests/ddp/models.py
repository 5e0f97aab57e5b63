"""Small models for the DDP tests, each with one difficulty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 18
TOKENS = 7


def mlp(
    width: int = 6, *, depth: int = 3, seed: int = 0, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """A few Linear layers with tanh between them, the same on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model from a known seed."""
    torch.manual_seed(seed)
    return make()


class Branches(nn.Module):
    """Runs the branches whose names it is given; the others go unused."""

    def __init__(self, names: str = "abc", width: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(width, width) for name in names})

    def forward(self, x: Tensor, names: str) -> Tensor:
        total = x.sum(dim=1)
        for name in names:
            total = total + self.branches[name](x).tanh().sum(dim=1)
        return total


class Normed(nn.Module):
    """A BatchNorm, whose buffers change in every forward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Bag(nn.Module):
    """A sparse embedding in front of a dense layer."""

    def __init__(self, rows: int = 12, width: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width, sparse=True)
        self.linear = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens)).tanh()


class Tied(nn.Module):
    """One weight under two names, used twice in a forward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@dataclass
class Answer:
    """A module's output that is no tensor."""

    main: Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    """Returns tensors deep inside containers and a dataclass."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.main = nn.Linear(width, 1)
        self.deep = nn.Linear(width, 1)
        self.unused = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.main(x), {"list": [(self.deep(x),)], "text": "no tensor"})


# --- drawn models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a drawn model: what it is, its dtype, and when it is used.

    ``used`` is one of: ``always``; ``never``; ``first rank``; ``last rank``; ``even steps``.
    """

    kind: str
    dtype: torch.dtype
    used: str = "always"

    def is_used(self, rank: int, world: int, step: int) -> bool:
        return {
            "always": True,
            "never": False,
            "first rank": rank == 0,
            "last rank": rank == world - 1,
            "even steps": step % 2 == 0,
        }[self.used]


class WithParameter(nn.Module):
    """A layer around one odd parameter."""

    def __init__(self, weight: Tensor, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x, self.weight)


class OnImages(nn.Module):
    """A convolution over the features, seen as images of 2 x 3 x 3."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(len(x), 2, 3, 3)).flatten(1)


class OnTokens(nn.Module):
    """An embedding of numbers made from the features."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 3, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x[:, :4].double().abs() * 10).long() % TOKENS).flatten(1)


class SharedPair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 3)
        self.two = nn.Linear(FEATURES, 3, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x.sin())


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _add_sum(x: Tensor, weight: Tensor) -> Tensor:
    return x[:, :1] + weight.sum()


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x[:, :2] * weight


def _absolute(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).abs()


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, 3),
    "wide": lambda: nn.Linear(FEATURES, 2500),
    "conv": lambda: OnImages(torch.contiguous_format),
    "conv, channels last": lambda: OnImages(torch.channels_last),
    "norm": lambda: nn.LayerNorm(FEATURES),
    "embedding": lambda: OnTokens(sparse=False),
    "sparse embedding": lambda: OnTokens(sparse=True),
    "shared": SharedPair,
    "transposed": lambda: WithParameter(torch.randn(FEATURES, 3).t(), _linear),
    "strided": lambda: WithParameter(torch.randn(6, FEATURES)[::2], _linear),
    "empty": lambda: WithParameter(torch.randn(0, 3), _add_sum),
    "scalar": lambda: WithParameter(torch.randn(()), _times),
    "complex": lambda: WithParameter(torch.randn(3, FEATURES, dtype=torch.complex64), _absolute),
}


class Drawn(nn.Module):
    """Independent parts, summed: every parameter's error is that of its own dtype."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.described = parts
        self.parts = nn.ModuleList(_build(part) for part in parts)

    def forward(self, x: Tensor, rank: int, world: int, step: int) -> Tensor:
        # Parts that are never used are no reason for a loss without a graph.
        total = x.sum(dim=1)
        for part, module in zip(self.described, self.parts, strict=True):
            if part.is_used(rank, world, step):
                total = total + module(x.to(part.dtype)).to(x.dtype).tanh().sum(dim=1)
        return total


def _build(part: Part) -> nn.Module:
    module = PARTS[part.kind]()
    return module if part.kind == "complex" else _cast(module, part.dtype)


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Not Module.to: it would make strided parameters dense.
    done: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                if parameter not in done:
                    done[parameter] = nn.Parameter(_cast_keeping_strides(parameter, dtype))
                child._parameters[name] = done[parameter]
    return module


def _cast_keeping_strides(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(max(length, 0), dtype=dtype)
    same = memory.as_strided(tensor.shape, tensor.stride())
    return same.copy_(tensor.detach())
