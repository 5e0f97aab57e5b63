"""A dry run: hooks on buckets of a model's size, with a group that sends nothing and counts.

Used by :func:`paceline.hooks.choose`. Compression and decompression really run; what a collective
would send is counted, as the usual algorithms send it. Needs no process group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.hooks.counting import CountingGroup
from paceline.hooks.interface import TensorFuture
from paceline.hooks.layout import BucketView, ParameterNumbers
from paceline.hooks.registry import NAMES
from paceline.hooks.state import HookState

BUCKET_NUMEL = 25 * 1024 * 1024 // 4
_SAMPLE_NUMEL = 2 * BUCKET_NUMEL  # more than this is extrapolated
_ROUNDS = 9
_ENOUGH_S = 0.5


class SampleBucket:
    """A bucket of parameters of one dtype, with random gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        self._parameters = list(parameters)
        self._index = index
        numel = sum(p.numel() for p in parameters)
        generator = torch.Generator().manual_seed(index)
        self._buffer = torch.randn(numel, generator=generator, dtype=parameters[0].dtype)

    def index(self) -> int:
        """Its place."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, as views of :meth:`buffer`."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self._parameters, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Every bucket ends a step of its own."""
        return True

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Exchange the gradients."""
        self._buffer = buffer


def measure(
    parameters: Sequence[torch.Tensor], name: str, options: dict[str, Any], world: int
) -> tuple[int, float]:
    """Return the bytes that a rank would send for one step, and the seconds it would compute.

    Wrappers have buckets of their own for each dtype, and so has this.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    costs = [_measure_same(same, name, options, world) for same in by_dtype.values()]
    return sum(sent for sent, _ in costs), sum(seconds for _, seconds in costs)


def _measure_same(
    parameters: Sequence[torch.Tensor], name: str, options: dict[str, Any], world: int
) -> tuple[int, float]:
    """Measure parameters of one dtype.

    The fastest round counts: in the first, memory is allocated, and others may be disturbed by
    what else runs on the machine. Time of the processor, for the same reason: this thread does its
    part of every operation, so it is what a round takes where nobody disturbs it.
    """
    group = CountingGroup(world)
    state = NAMES[name].make_state(group, **options)
    buckets = list(_buckets(parameters))
    measured = sum(bucket.buffer().numel() for bucket in buckets)
    scale = sum(p.numel() for p in parameters) / max(1, measured)
    rounds_s: list[float] = []
    while len(rounds_s) < 2 or (len(rounds_s) < _ROUNDS and sum(rounds_s) < _ENOUGH_S):
        group.sent_bytes = 0
        start_s = time.thread_time()
        for bucket in buckets:
            _run(name, state, bucket)
        rounds_s.append(time.thread_time() - start_s)
    return int(group.sent_bytes * scale), min(rounds_s) * scale


def _run(name: str, state: Any, bucket: SampleBucket) -> None:
    if isinstance(state, HookState):
        view = BucketView.of(bucket, _numbers(state))
        for start in state.rounds(view, 1_000_000):
            start(state.group)
        return
    future: TensorFuture = NAMES[name].hook(state, bucket)
    future.wait()


def _numbers(state: Any) -> ParameterNumbers:
    numbers: ParameterNumbers = state._numbers
    return numbers


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[SampleBucket]:
    """Cut parameters into buckets of some 25 MB, up to the size of a sample."""
    batch: list[torch.Tensor] = []
    total = index = 0
    for parameter in parameters:
        batch.append(parameter)
        total += parameter.numel()
        if sum(p.numel() for p in batch) >= BUCKET_NUMEL:
            yield SampleBucket(batch, index)
            batch, index = [], index + 1
            if total >= _SAMPLE_NUMEL:
                return
    if batch:
        yield SampleBucket(batch, index)
