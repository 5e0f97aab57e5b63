"""Which parameter lies where in a bucket, and values that stay with their parameter.

Used by hooks that remember something for every gradient, such as what compression has left out.
Both wrappers cut their buckets anew after the first step, and a resumed run starts with the buckets
of a first step: what is remembered is kept flat per bucket, because that is fast, and moves with
the parameters when buckets change. Must not know groups or what the values mean.

[Note: buckets change from one on]
The buckets of a step come by index. If bucket i holds other parameters than in the step before, so
may those after it; those before it have been seen in this step, are as they were, and may be on
their way just now. So what is remembered moves for bucket i and after, and nothing else is touched.

A parameter's number is its place in the order in which buckets showed it first. Buckets of a first
step follow the model's own order, so the numbers are the same in a run and in its resumption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from paceline.errors import ConfigurationError
from paceline.hooks.interface import HookBucket
from paceline.hooks.undo import UndoLog

Numbers = tuple[int, ...]


class ParameterNumbers:
    """Numbers parameters in the order in which they are seen."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._seen: list[torch.Tensor] = []  # an id is unique only as long as its object lives

    def numbers(self, parameters: Sequence[torch.Tensor]) -> Numbers:
        """Return the numbers of these parameters; new ones get the next."""
        for parameter in parameters:
            if id(parameter) not in self._numbers:
                self._numbers[id(parameter)] = len(self._seen)
                self._seen.append(parameter)
        return tuple(self._numbers[id(parameter)] for parameter in parameters)


@dataclass(frozen=True)
class BucketView:
    """One bucket of one step, as stateful hooks work on it.

    Attributes:
        index: The bucket's place in the step.
        values: The gradients, flat and real, in the wrapper's memory: the result goes there too.
        numbers: The parameters' numbers.
        shapes: Of each parameter, (rows, columns) in ``values``; vectors have one column.
        is_last: Whether no further bucket follows in this step.
    """

    index: int
    values: torch.Tensor
    numbers: Numbers
    shapes: tuple[tuple[int, int], ...]
    is_last: bool

    @classmethod
    def of(cls, bucket: HookBucket, book: ParameterNumbers) -> BucketView:
        """Look at a bucket."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        factor = 2 if buffer.is_complex() else 1
        values = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer.view(-1)
        shapes = tuple(_matrix_shape(parameter, factor) for parameter in parameters)
        return cls(bucket.index(), values, book.numbers(parameters), shapes, bucket.is_last())

    @property
    def numel(self) -> int:
        """How many real numbers the bucket holds."""
        return sum(self.sizes)

    @property
    def compute_dtype(self) -> torch.dtype:
        """In what hooks calculate: float32, or float64 for float64 gradients."""
        return torch.float64 if self.values.dtype == torch.float64 else torch.float32

    @property
    def sizes(self) -> list[int]:
        """How many values each parameter has."""
        return [rows * columns for rows, columns in self.shapes]

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut something that is as long as the bucket into the parameters' parts."""
        ends = accumulate(self.sizes)
        return [flat[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def _matrix_shape(parameter: torch.Tensor, factor: int) -> tuple[int, int]:
    numel = parameter.numel() * factor
    rows = parameter.shape[0] if parameter.dim() > 0 else 1
    return (rows, numel // rows) if rows else (0, 0)


class Memory:
    """Named values for every element of every bucket, zero at first."""

    def __init__(self) -> None:
        self._by_bucket: dict[int, _BucketMemory] = {}
        self._pool: dict[tuple[str, int], torch.Tensor] = {}
        self.undo = UndoLog()
        self.before_move: Callable[[int], None] = lambda first: None
        """Called before buckets change from one on, while everything is still where it was."""

    def get(
        self, view: BucketView, name: str, *, padded_numel: int = 0, keep: bool = True
    ) -> torch.Tensor:
        """Return the values of a bucket, to be changed in place.

        Args:
            view: The bucket.
            name: Which values.
            padded_numel: How long to make it; what is beyond the bucket is for the caller.
            keep: False: zeros, that nobody remembers.
        """
        numel = max(view.numel, padded_numel)
        if not keep:
            return view.values.new_zeros(numel, dtype=view.compute_dtype)
        memory = self._memory_of(view)
        if name not in memory.values:
            flat = view.values.new_zeros(numel, dtype=view.compute_dtype)
            for number, piece in zip(view.numbers, view.pieces(flat), strict=True):
                kept = self._pool.pop((name, number), None)
                if kept is not None:
                    piece.copy_(_checked(kept, piece, number))
            memory.values[name] = flat
        flat = memory.values[name]
        if flat.numel() != numel:  # other ranks, other padding
            memory.values[name] = flat.new_zeros(numel)
            memory.values[name][: view.numel].copy_(flat[: view.numel])
        self.undo.before(memory.values[name])
        return memory.values[name]

    def flats(self, name: str) -> dict[int, torch.Tensor]:
        """The values of every bucket that has some, by index."""
        found = {
            i: (s.view, s.values[name]) for i, s in self._by_bucket.items() if name in s.values
        }
        return {index: flat[: view.numel] for index, (view, flat) in found.items()}

    def whole_flats(self, name: str) -> list[torch.Tensor]:
        """The same, each with its padding: what :class:`UndoLog` knows."""
        return [s.values[name] for s in self._by_bucket.values() if name in s.values]

    def state_dict(self) -> dict[str, dict[int, torch.Tensor]]:
        """All values, by name and parameter number, copied."""
        saved: dict[str, dict[int, torch.Tensor]] = {}
        for (name, number), piece in self._pieces().items():
            saved.setdefault(name, {})[number] = piece.detach().clone()
        return saved

    def load_state_dict(self, saved: dict[str, dict[int, torch.Tensor]]) -> None:
        """Forget everything and take what was saved."""
        self._by_bucket = {}
        self._pool = {
            (name, int(number)): piece.clone()
            for name, pieces in saved.items()
            for number, piece in pieces.items()
        }

    def contents(self) -> Any:
        """Which tensors lie where; for :meth:`set_contents`, after ``undo.roll_back()``."""
        buckets = {i: (m.view, dict(m.values)) for i, m in self._by_bucket.items()}
        return buckets, dict(self._pool)

    def set_contents(self, contents: Any) -> None:
        """Undo what has been moved or added since :meth:`contents`."""
        buckets, pool = contents
        self._by_bucket = {i: _BucketMemory(v, dict(values)) for i, (v, values) in buckets.items()}
        self._pool = dict(pool)

    def _memory_of(self, view: BucketView) -> _BucketMemory:
        memory = self._by_bucket.get(view.index)
        if memory is not None and memory.view.numbers != view.numbers:
            self._move_from(view.index)
            memory = None
        if memory is None:
            # The view's own values belong to the wrapper, and are not kept.
            bare = BucketView(view.index, view.values[:0], view.numbers, view.shapes, view.is_last)
            memory = self._by_bucket[view.index] = _BucketMemory(bare, {})
        return memory

    def _move_from(self, first: int) -> None:
        """See [Note: buckets change from one on]."""
        for index, memory in self._by_bucket.items():
            if index >= first:
                self.undo.before(*memory.values.values())
        self.before_move(first)
        for index in [index for index in self._by_bucket if index >= first]:
            self._pool |= self._by_bucket.pop(index).pieces()

    def _pieces(self) -> dict[tuple[str, int], torch.Tensor]:
        pieces = dict(self._pool)
        for memory in self._by_bucket.values():
            pieces |= memory.pieces()
        return pieces


@dataclass
class _BucketMemory:
    """What is remembered for one bucket."""

    view: BucketView
    values: dict[str, torch.Tensor]

    def pieces(self) -> dict[tuple[str, int], torch.Tensor]:
        """All values, by name and parameter number, where they lie."""
        return {
            (name, number): piece
            for name, flat in self.values.items()
            for number, piece in zip(self.view.numbers, self.view.pieces(flat), strict=True)
        }


def _checked(kept: torch.Tensor, place: torch.Tensor, number: int) -> Any:
    if kept.numel() != place.numel():
        raise ConfigurationError(
            f"The hook's state holds {kept.numel()} values for parameter number {number}, which "
            f"has {place.numel()} here: it was saved with another model. Load the state that "
            "belongs to this model, or begin with a new one."
        )
    return kept
