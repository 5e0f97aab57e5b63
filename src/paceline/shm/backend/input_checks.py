"""What the backend refuses before a collective begins: tensors and ranks that do not fit it.

Each text has the phrase of gloo's for the same mistake; ``tests/shm/backend/test_phrases.py``
raises both. Called by :mod:`paceline.shm.backend.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import CollectiveInputError

Tensors = Sequence[torch.Tensor]

_COUNTS = {
    "all_gather": "invalid output tensor list at index 0 (expected length {world}, got {found})",
    "gather": "Incorrect output list size {found}. Output list size should be {world}, same as "
    "size of the process group",
    "scatter": "Incorrect input list size {found}. Input list size should be {world}, same as "
    "size of the process group",
    "reduce_scatter": "invalid input tensor list size, must be world size: {found}, not {world}",
    "all_to_all input": "input tensor list size {found} does not match world size {world}",
    "all_to_all output": "output tensor list size {found} does not match world size {world}",
}


@dataclass(frozen=True)
class InputChecks:
    """The checks of one rank of a group.

    Raises, from every method:
        CollectiveInputError: What the caller brought does not fit.
    """

    rank: int
    world: int

    def root(self, what: str, root: int) -> int:
        """Return the root, if the group has that rank."""
        if not 0 <= root < self.world:
            raise self._error(what, f"invalid root rank: {root}. Ranks are 0 to {self.world - 1}.")
        return root

    def count(self, what: str, parts: Tensors) -> None:
        """One tensor for each rank."""
        if len(parts) != self.world:
            text = _COUNTS[what].format(found=len(parts), world=self.world)
            raise self._error(what, f"{text}. Give one tensor for each rank.")

    def parts(self, what: str, parts: Tensors, whole: torch.Tensor) -> None:
        """One tensor for each rank, and all of them like one."""
        self.count(what, parts)
        check_cpu([whole, *parts])
        for index, part in enumerate(parts):
            if part.dtype != whole.dtype:
                wrong, expected, found = "type", str(whole.dtype), str(part.dtype)
            elif part.numel() != whole.numel():
                wrong, expected, found = "size", _size(whole), _size(part)
            else:
                continue
            raise self._error(
                what,
                f"invalid tensor {wrong} at index {index} (expected {expected}, got {found})",
            )

    def cut(self, what: str, large: torch.Tensor, small: torch.Tensor) -> Tensors:
        """Cut a tensor into one part for each rank."""
        if large.numel() != small.numel() * self.world or large.dtype != small.dtype:
            raise self._error(
                what,
                f"{large.numel()} {large.dtype} are not {self.world} times {small.numel()} "
                f"{small.dtype}.",
            )
        flat = _flat(what, large)
        return [flat.narrow(0, i * small.numel(), small.numel()) for i in range(self.world)]

    def split(self, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> Tensors:
        """Cut a tensor along its first dimension; into equal parts, if nothing else is said."""
        _flat("all_to_all_single", tensor)
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits and len(splits) != self.world:
            raise self._wrong_split(
                what, rows, splits, "Number of tensor splits not equal to group size"
            )
        if splits and sum(splits) != rows:
            raise self._wrong_split(
                what, rows, splits, "Split sizes doesn't match total dim 0 size"
            )
        sizes = list(splits) or [rows // self.world] * self.world
        if sum(sizes) != rows:
            phrase = "Tensor's dim 0 does not divide equally across group size"
            raise self._wrong_split(what, rows, sizes, phrase)
        return list(tensor.split(sizes))

    def _wrong_split(
        self, what: str, rows: int, sizes: Sequence[int], phrase: str
    ) -> CollectiveInputError:
        return self._error(
            "all_to_all_single",
            f"{phrase}: the {rows} rows of the {what} tensor cannot be split into {list(sizes)} "
            f"for {self.world} ranks. Give {what}_split_sizes that add up.",
        )

    def _error(self, what: str, text: str) -> CollectiveInputError:
        return CollectiveInputError(f"{what.split()[0]} on rank {self.rank}: {text}")


def check_cpu(tensors: Tensors) -> None:
    """All tensors are on the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise CollectiveInputError(
                f"The paceline backend works on CPU tensors, and one is on {tensor.device}. Make "
                "another group for it: dist.new_group(backend=...)."
            )


def _flat(what: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise CollectiveInputError(f"{what} needs a contiguous tensor. Call .contiguous() first.")
    return tensor.view(-1)


def _size(tensor: torch.Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
