"""SyncBatchNorm on ranks, and BatchNorm on the concatenated batch in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import run_ranks
from paceline.torch_private.groups import collectives_started


@dataclass(frozen=True)
class Case:
    """One normalisation.

    Attributes:
        sizes: Batch size of each rank.
        shape: Of one sample, channels first.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...] = (3, 4, 5)
    dtype: torch.dtype = torch.float32
    module_dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    autocast: bool = False
    steps: int = 2
    shift: float = 3.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def norm(self) -> nn.Module:
        """The layer to convert, with parameters that are not all ones and zeros."""
        made = _KINDS[len(self.shape)](self.shape[0], **self.options)
        torch.manual_seed(self.seed)
        for parameter in made.parameters():
            nn.init.normal_(parameter)
        return made.to(self.module_dtype or torch.float32)

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and output gradients of all ranks."""
        generator = torch.Generator().manual_seed(100 * self.seed + step)
        total = sum(self.sizes)
        x = torch.randn(total, *self.shape, generator=generator) * 2 + self.shift
        dy = torch.randn(total, *self.shape, generator=generator)
        pieces = zip(x.split(list(self.sizes)), dy.split(list(self.sizes)), strict=True)
        return [(self._prepare(a), self._prepare(b)) for a, b in pieces]

    def _prepare(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype).contiguous(memory_format=self.memory_format)


_KINDS: dict[int, Any] = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm1d,
    3: nn.BatchNorm2d,
    4: nn.BatchNorm3d,
}


@dataclass
class Result:
    """Of one rank, or of the whole; gradients of parameters summed over ranks."""

    outputs: list[torch.Tensor]
    input_gradients: list[torch.Tensor]
    parameter_gradients: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    eval_output: torch.Tensor
    collectives: list[tuple[int, int]] = field(default_factory=list)


def on_rank(case: Case) -> Result:
    layer = paceline.nn.SyncBatchNorm.convert_sync_batchnorm(case.norm())
    outputs, gradients, counts = [], [], []
    for step in range(case.steps):
        x, dy = case.batches(step)[dist.get_rank()]
        x.requires_grad_()
        start = collectives_started(dist.group.WORLD)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            y = layer(x)
        middle = collectives_started(dist.group.WORLD)
        y.backward(dy.to(y.dtype))
        counts.append((middle - start, collectives_started(dist.group.WORLD) - middle))
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    parameters = [p.grad for p in layer.parameters() if p.grad is not None]
    for gradient in parameters:
        dist.all_reduce(gradient)
    layer.eval()
    seen = layer(case.batches(0)[0][0]) if case.sizes[0] else torch.empty(0)
    return Result(outputs, gradients, parameters, layer.state_dict(), seen.detach(), counts)


def whole(case: Case, dtype: torch.dtype | None = None) -> Result:
    """BatchNorm on the concatenated batch; in another dtype to see what rounding alone does."""
    layer = copy.deepcopy(case.norm())
    if dtype is not None:
        layer.to(dtype)
    outputs, gradients = [], []
    for step in range(case.steps):
        pairs = case.batches(step)
        x = torch.cat([a for a, _ in pairs]).to(dtype or case.dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            y = layer(x)
        y.backward(torch.cat([b for _, b in pairs]).to(y.dtype))
        assert x.grad is not None
        outputs.append(y.detach())
        gradients.append(x.grad)
    parameters = [p.grad for p in layer.parameters() if p.grad is not None]
    layer.eval()
    seen = layer(case.batches(0)[0][0].to(dtype or case.dtype)) if case.sizes[0] else torch.empty(0)
    return Result(outputs, gradients, parameters, layer.state_dict(), seen.detach())


def assert_same_as_whole(case: Case, **tolerance: float) -> list[Result]:
    """Compare all that ranks computed with the one process."""
    ranks = run_ranks(len(case.sizes), on_rank, case)
    expected = whole(case)
    for step in range(case.steps):
        pairs = (
            ([r.outputs[step] for r in ranks], expected.outputs[step]),
            ([r.input_gradients[step] for r in ranks], expected.input_gradients[step]),
        )
        for pieces, reference in pairs:
            torch.testing.assert_close(torch.cat(pieces), reference, **tolerance)
    for rank in ranks:
        torch.testing.assert_close(
            rank.parameter_gradients, expected.parameter_gradients, **tolerance
        )
        torch.testing.assert_close(rank.state, expected.state, **tolerance)
        for name, value in rank.state.items():
            assert torch.equal(value, ranks[0].state[name])  # not only close: the same on all ranks
    torch.testing.assert_close(ranks[0].eval_output, expected.eval_output, **tolerance)
    return ranks
