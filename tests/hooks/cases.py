"""Every hook with the error that its documentation promises, and a bucket to try it on.

Runs in the ranks. The exact mean is taken in float64 from all ranks' inputs, which every rank can
make by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline import hooks

EPS = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
    torch.float32: 2**-24,
    torch.float64: 2**-53,
}


class Bucket:
    """A bucket as a wrapper would hand it out."""

    def __init__(
        self, buffer: Tensor, parameters: list[Tensor], *, index: int = 0, is_last: bool = True
    ) -> None:
        self._buffer = buffer
        self._parameters = parameters
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        sizes = [p.numel() for p in self._parameters]
        parts = zip(self._buffer.split(sizes), self._parameters, strict=True)
        return [part.view(p.shape) for part, p in parts]

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer


Bound = Callable[[Tensor], Tensor]
"""From all ranks' values (rank x value, float64) to the largest error of each value."""


@dataclass(frozen=True)
class Case:
    """One hook.

    Attributes:
        make: Returns (state, hook).
        bound: What the documentation promises for one step.
        feedback: Whether what is left out comes later.
        largest: The largest value that it can carry.
        takes_complex: Whether complex gradients work.
        converges_after: After how many steps the running sum's error no longer grows.
    """

    make: Callable[[], tuple[Any, Any]]
    bound: Bound
    feedback: bool = False
    largest: float = 1e30
    takes_complex: bool = True
    converges_after: int = 10
    options: dict[str, Any] = field(default_factory=dict)


def exact(values: Tensor) -> Tensor:
    return torch.zeros_like(values[0])


def rounded(eps: float) -> Bound:
    """Rounded once on each rank and once for every sum, relative to what is summed."""
    return lambda values: 4 * eps * values.abs().mean(dim=0)


def blockwise(step: float, block: int = 512) -> Bound:
    """A part of the largest value around, for each rank's encoding and for that of the mean."""

    def bound(values: Tensor) -> Tensor:
        around = largest_around(values, block)
        # The mean that is encoded has the errors of its parts.
        mean = largest_around(values.mean(dim=0, keepdim=True), block)[0]
        return step * (around.mean(dim=0) * (1 + step) + mean) * (1 + 1e-5)

    return bound


def largest_around(values: Tensor, block: int) -> Tensor:
    """The largest magnitude within a block's length, whatever the blocks are aligned to."""
    numel = values.shape[1]
    blocks = F.pad(values.abs(), (0, -numel % block)).view(len(values), -1, block).amax(dim=2)
    around = F.max_pool1d(blocks.unsqueeze(1), 3, stride=1, padding=1).squeeze(1)
    return around.repeat_interleave(block, dim=1)[:, :numel]


def fp8(relative: float, smallest: float) -> Bound:
    def bound(values: Tensor) -> Tensor:
        small = smallest * largest_around(values, 512)
        local = (values.abs() * relative + small).mean(dim=0)
        mean = values.mean(dim=0).abs() + local
        return (local + mean * relative + small.mean(dim=0)) * (1 + 1e-5)

    return bound


def affine(values: Tensor) -> Tensor:
    """One of 255 steps from the smallest to the largest, zero included."""
    zeros = torch.zeros_like(values[:, :1])
    padded = torch.cat([values, zeros], dim=1)
    steps = (padded.amax(dim=1) - padded.amin(dim=1)) / 255
    return (steps.clamp(min=2**-23).mean() * (1 + 1e-5)).expand_as(values[0])


def largest_left_out(ratio: float) -> Bound:
    def bound(values: Tensor) -> Tensor:
        k = max(1, -int(-ratio * values.shape[1] // 1))
        if k * len(values) >= values.shape[1]:
            return 4 * EPS[torch.float32] * values.abs().mean(dim=0)
        left = values.abs().topk(k, dim=1).values[:, -1]
        rounding = EPS[torch.float32] * values.abs().mean(dim=0)
        return left.mean() + 4 * rounding

    return bound


def length_of_mean(values: Tensor) -> Tensor:
    """A projection is never farther away than zero is: in length, so for each value too."""
    return (values.mean(dim=0).norm() * (1 + 1e-4)).expand_as(values[0])


def quantized(**options: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (hooks.QuantizedState(**options), hooks.quantized_hook)


def power_sgd(hook: Any, **options: Any) -> Callable[[], tuple[Any, Any]]:
    early = {"start_powerSGD_iter": 0, "compresses_first_steps": True}
    settings = early | {"min_compression_rate": 1} | options
    return lambda: (hooks.PowerSGDState(None, **settings), hook)


def top_k(**options: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (hooks.TopKState(**options), hooks.topk_hook)


def stateless(hook: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (None, hook)


CASES = {
    "allreduce": Case(stateless(hooks.allreduce_hook), rounded(EPS[torch.float32])),
    "fp16": Case(stateless(hooks.fp16_compress_hook), rounded(EPS[torch.float16]), largest=6e4),
    "bf16": Case(stateless(hooks.bf16_compress_hook), rounded(EPS[torch.bfloat16])),
    "int8": Case(quantized(wire="int8"), blockwise(1 / 254), feedback=True),
    "int8, stochastic": Case(
        quantized(wire="int8", stochastic=True), blockwise(1 / 127), feedback=True
    ),
    "int8, no feedback": Case(quantized(wire="int8", error_feedback=False), blockwise(1 / 254)),
    "int8, blocks of 64": Case(
        quantized(wire="int8", block=64), blockwise(1 / 254, 64), feedback=True
    ),
    "e4m3": Case(quantized(wire="e4m3"), fp8(2**-4, 2**-10 / 448), feedback=True),
    "e5m2": Case(quantized(wire="e5m2"), fp8(2**-3, 2**-17 / 57344), feedback=True),
    "sign": Case(quantized(wire="sign"), blockwise(2.0), feedback=True, converges_after=40),
    "powersgd": Case(
        power_sgd(hooks.powerSGD_hook), length_of_mean, feedback=True, converges_after=40
    ),
    "powersgd, rank 4": Case(
        power_sgd(hooks.powerSGD_hook, matrix_approximation_rank=4),
        length_of_mean,
        feedback=True,
        converges_after=40,
    ),
    "batched powersgd": Case(
        power_sgd(hooks.batched_powerSGD_hook), length_of_mean, feedback=True, converges_after=40
    ),
    "topk 10 %": Case(top_k(ratio=0.1), largest_left_out(0.1), feedback=True, converges_after=40),
    "topk, all": Case(top_k(ratio=1.0), rounded(EPS[torch.float32]), feedback=True),
    "quantise per tensor": Case(
        stateless(hooks.quantization_pertensor_hook), affine, takes_complex=False
    ),
    "quantise per channel": Case(
        stateless(hooks.quantization_perchannel_hook), affine, takes_complex=False
    ),
    "int8 in fp16": Case(
        lambda: (hooks.QuantizedState(), hooks.fp16_compress_wrapper(hooks.quantized_hook)),
        lambda v: blockwise(1 / 254)(v) + rounded(EPS[torch.float16])(v),
        feedback=True,
        largest=6e4,
        takes_complex=False,
    ),
    "topk in bf16": Case(
        lambda: (hooks.TopKState(ratio=0.1), hooks.bf16_compress_wrapper(hooks.topk_hook)),
        lambda v: largest_left_out(0.1)(v) + rounded(EPS[torch.bfloat16])(v),
        feedback=True,
        takes_complex=False,
        converges_after=40,
    ),
    "powersgd in bf16": Case(
        lambda: (
            hooks.PowerSGDState(None, start_powerSGD_iter=0, compresses_first_steps=True),
            hooks.bf16_compress_wrapper(hooks.powerSGD_hook),
        ),
        lambda v: length_of_mean(v) * (1 + 2**-5),
        feedback=True,
        takes_complex=False,
        converges_after=40,
    ),
}
