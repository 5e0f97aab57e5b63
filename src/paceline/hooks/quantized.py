"""Quantised all-reduce that scales: the bytes do not grow with the number of ranks.

A bucket is cut into as many slices as there are ranks, and goes through two rounds:

1. every rank encodes its gradients, and sends slice r to rank r (all-to-all);
2. rank r decodes what it got, takes the mean in float32, encodes that, and sends it to all.

So each value crosses the wire twice, as in a ring all-reduce, but as one byte (or one bit) instead
of four. Every rank decodes the same bytes, also of its own slice: the same bits everywhere.

Error feedback: what a rank's encoding of its gradients left out is added to its next gradients, and
what the owner's encoding of the mean left out is added to its next mean. The running sum of what
comes out follows the running sum of the true means, always by the errors of the last step only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks.codecs import Codec, Fp8Codec, Int8Codec, SignCodec
from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    comm_hook,
    start_all_gather,
    start_all_to_all,
)
from paceline.hooks.layout import BucketView
from paceline.hooks.round_scheduler import Rounds
from paceline.hooks.state import HookState

WIRES = ("int8", "e4m3", "e5m2", "sign")
ERROR = "error"


class QuantizedState(HookState):
    """Settings and memory of :func:`quantized_hook`.

    Args:
        process_group: What to reduce over; None is the default group.
        wire: ``"int8"``, ``"e4m3"`` or ``"e5m2"`` (fp8), or ``"sign"`` (one bit).
        block: How many values share a scale; a multiple of 8.
        stochastic: Round up or down by chance so that errors are zero on average. For int8.
        error_feedback: Add to the next step what compression left out of this one. ``sign`` does
            not converge without it.
        start_step: Steps before this one use a plain all-reduce. ``sign`` needs it: the gradients
            of the first steps are the hardest to tell in one bit.
        seed: Of the chance; each rank, step and bucket has its own stream.

    Raises:
        ConfigurationError: A setting is wrong.
    """

    ROUNDS = 2
    NAME = "quantized_hook"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        wire: str = "int8",
        block: int = 512,
        stochastic: bool = False,
        error_feedback: bool = True,
        start_step: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(process_group)
        _check(wire, block, stochastic)
        self.start_step = start_step
        self.wire = wire
        self.block = block
        self.stochastic = stochastic
        self.error_feedback = error_feedback
        self.seed = seed
        # By bucket: what the encoding of this rank's slice of the mean has left out.
        self._mean_errors: dict[int, torch.Tensor] = {}
        self._place = (0, 1)  # the rank and the number of ranks that slices of the mean are cut for
        self._scratch = _Scratch()
        self._after_unpickling()

    def _after_unpickling(self) -> None:
        self.memory.before_move = self._fold_mean_errors

    @property
    def first_step(self) -> int:
        """See ``start_step``."""
        return self.start_step

    def codec(self, block: int) -> Codec:
        """The codec for blocks of this size."""
        if self.wire == "int8":
            return Int8Codec(block, stochastic=self.stochastic)
        return SignCodec(block) if self.wire == "sign" else Fp8Codec(block, self.wire)

    def rounds(self, view: BucketView, step: int) -> Rounds:
        """See the module's docstring."""
        cut = _Cut.of(view, self.group, self.block)
        self._place = cut.rank, cut.world
        codec = self.codec(cut.block)
        noise = self._noise(view, step, cut)
        keep = self.error_feedback
        sent, received = self._scratch.take(cut, codec, view)
        mine = self._own_values(view, cut)
        codec.encode(mine, sent, noise=noise, add=view.values, keep_error=keep)
        yield lambda group: start_all_to_all(received, sent, group)
        mean = self._mean_error(view, cut)
        codec.decode_add_mean(received, mean)
        codec.encode(mean.unsqueeze(0), sent[:1], noise=noise, keep_error=keep)
        yield lambda group: start_all_gather(received, sent[0], group)
        _read_all(codec, received, view, cut)
        self._scratch.give_back(sent, received)
        return view.values

    def _own_values(self, view: BucketView, cut: _Cut) -> torch.Tensor:
        """What this rank has left out before, or zeros: slices x values."""
        keep, numel = self.error_feedback, cut.padded_numel
        padded = self.memory.get(view, ERROR, padded_numel=numel, keep=keep)
        padded[view.numel :].zero_()  # a codec may read padding as something else
        return padded.view(cut.world, cut.slice_numel)

    def _mean_error(self, view: BucketView, cut: _Cut) -> torch.Tensor:
        """What the encoding of this rank's slice of the mean has left out before, or zeros."""
        kept = self._mean_errors.get(view.index)
        if kept is None or kept.numel() != cut.slice_numel:
            kept = view.values.new_zeros(cut.slice_numel, dtype=view.compute_dtype)
            if self.error_feedback:
                self._mean_errors[view.index] = kept
        self.memory.undo.before(kept)
        return kept

    def _fold_mean_errors(self, first: int) -> None:
        """Before buckets change: what is missing in a mean is missing in this rank's gradients.

        Times the number of ranks, because a mean will be taken.
        """
        rank, world = self._place[0], self.group.size()
        flats = self.memory.flats(ERROR)
        for index in [index for index in self._mean_errors if index >= first]:
            kept = self._mean_errors.pop(index)
            if index in flats:
                start = rank * kept.numel()
                mine = flats[index][start : start + kept.numel()]
                mine.add_(kept[: mine.numel()], alpha=world)

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Go on with other ranks: a slice of the mean that is now another rank's comes along."""
        super().change_group(group)
        self._scratch = _Scratch()
        if (group.rank(), group.size()) != self._place:
            self.memory.undo.before(*self.memory.whole_flats(ERROR))
            self._fold_mean_errors(0)

    def forget_feedback(self) -> None:
        """See :meth:`HookState.forget_feedback`."""
        super().forget_feedback()
        self._mean_errors = {}

    def _extra_mark(self) -> Any:
        return self._place, dict(self._mean_errors)

    def _set_extra_mark(self, extra: Any) -> None:
        self._place, errors = extra
        self._mean_errors = dict(errors)

    def _noise(self, view: BucketView, step: int, cut: _Cut) -> torch.Generator | None:
        if not self.stochastic:
            return None
        # A stream for each rank, step and bucket: a resumed run draws the same.
        words = (self.seed, cut.rank, step, view.index)
        return torch.Generator(view.values.device).manual_seed(_mix(words))

    def _extra_state(self) -> dict[str, Any]:
        return {"mean_errors": {i: kept.clone() for i, kept in self._mean_errors.items()}}

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        if dist.is_initialized():
            self._place = self.group.rank(), self.group.size()
        saved = extra["mean_errors"].items()
        self._mean_errors = {int(index): kept.clone() for index, kept in saved}


@comm_hook
def quantized_hook(state: QuantizedState, bucket: HookBucket) -> TensorFuture:
    """Reduce a bucket in int8, fp8 or single bits, as the state says."""
    return state.run(bucket)


@dataclass(frozen=True)
class _Cut:
    """A bucket as slices of whole blocks.

    Attributes:
        world: How many slices.
        rank: Which of them is ours.
        block: Values in a block; smaller than asked for if the bucket is.
        slice_numel: Values in a slice.
    """

    world: int
    rank: int
    block: int
    slice_numel: int

    @classmethod
    def of(cls, view: BucketView, group: dist.ProcessGroup, block: int) -> _Cut:
        return cls.cut(view.numel, group.size(), group.rank(), block)

    @classmethod
    def cut(cls, numel: int, world: int, rank: int, block: int) -> _Cut:
        share = max(8, -(-numel // world))
        block = min(block, -(-share // 8) * 8)
        return cls(world, rank, block, -(-share // block) * block)

    @property
    def padded_numel(self) -> int:
        return self.world * self.slice_numel


class _Scratch:
    """Byte buffers that go from bucket to bucket: fresh memory costs more than what is done in it.

    Only the scheduler's thread takes and gives.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int, int], list[torch.Tensor]] = {}

    def take(self, cut: _Cut, codec: Codec, view: BucketView) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two buffers of a row for each rank; padding in them holds anything."""
        row = codec.row_bytes(cut.slice_numel, view.compute_dtype)
        device = view.values.device
        free = self._free.setdefault((device, cut.world, row), [])
        while len(free) < 2:
            free.append(torch.zeros(cut.world, row, dtype=torch.uint8, device=device))
        return free.pop(), free.pop()

    def give_back(self, *buffers: torch.Tensor) -> None:
        """Let the next bucket have them."""
        for buffer in buffers:
            self._free[buffer.device, buffer.shape[0], buffer.shape[1]].append(buffer)


def _read_all(codec: Codec, wire: torch.Tensor, view: BucketView, cut: _Cut) -> None:
    """Decode every slice into the bucket; what lies beyond its end is padding."""
    width = cut.slice_numel
    whole = view.numel // width
    values = view.values
    if values.dtype == view.compute_dtype:
        codec.decode(wire[:whole], values[: whole * width].view(whole, width))
    else:
        whole = 0
    rest = wire[whole : math.ceil(view.numel / width)]
    padded = torch.empty(len(rest), width, dtype=view.compute_dtype, device=values.device)
    codec.decode(rest, padded)
    values[whole * width :].copy_(padded.view(-1)[: view.numel - whole * width])


def _mix(words: tuple[int, ...]) -> int:
    """Make one seed of several numbers (a polynomial modulo 2^61 - 1)."""
    seed = 0
    for word in words:
        seed = (seed * 1_000_003 + word + 1) % ((1 << 61) - 1)
    return seed


def _check(wire: str, block: int, stochastic: bool) -> None:
    if wire not in WIRES:
        raise ConfigurationError(
            f"wire={wire!r} is not known. Write one of: {', '.join(map(repr, WIRES))}."
        )
    if type(block) is not int or block < 8 or block % 8:
        raise ConfigurationError(f"block is a multiple of 8 and at least 8, not {block!r}")
    if stochastic and wire != "int8":
        raise ConfigurationError(
            f"stochastic=True works with wire='int8', but wire is {wire!r}. Leave it out: error "
            "feedback takes care of systematic errors too."
        )
