"""One bucket: its memory, its slots, how many gradients it still waits for, the work in flight.

One per entry of a plan (ddp/reduce/bucket_set.py). Knows its memory and its parameters; must not
know about groups, hooks, steps or autograd.

Roles of the tensors:
    flat       all of the bucket's memory, which is what is reduced
    gradients  the front of ``flat`` that holds gradients: what hooks see
    trailer       the rest, where a few control words may ride along
    view       one slot's part of ``gradients``, in the shape and strides of its parameter
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from paceline.buckets.plan import BucketSpec, ParameterSpec
from paceline.torch_private.autograd import storage_references
from paceline.types import Reduction

SMALL_BYTES = 128 * 1024
"""Gradients below this are copied in batches: a call costs more than the copy."""


class Slot:
    """One parameter's place in a bucket.

    ``view`` is None while the bucket has no memory, and for sparse gradients. A slot knows its
    bucket only by number: a reference would be a cycle, and keep the memory of a dropped bucket
    until the garbage collector comes by. ``is_shared`` says that in this step its view must not
    become the parameter's gradient before the end.
    """

    __slots__ = ("bucket_index", "index", "is_shared", "parameter", "small", "spec", "view")

    def __init__(
        self, spec: ParameterSpec, parameter: torch.Tensor, bucket_index: int, small_bytes: int
    ) -> None:
        self.spec = spec
        self.index = spec.index
        self.parameter = parameter
        self.bucket_index = bucket_index
        self.small = spec.nbytes < small_bytes and not spec.sparse
        self.view: torch.Tensor | None = None
        self.is_shared = False

    def zero(self) -> None:
        """Clear this slot's part of the bucket."""
        if self.view is not None:
            self.view.zero_()


class Bucket:
    """The state behind one :class:`BucketSpec`.

    In a step, ``pending`` counts the gradients that it waits for, and ``absent`` those that are
    known never to arrive.

    Attributes:
        sparse: It holds one sparse gradient.
        hooks_can_copy: The native core can copy gradients in.
    """

    def __init__(
        self,
        index: int,
        spec: BucketSpec,
        parameters: Sequence[torch.Tensor],
        *,
        trailer_numel: int = 0,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self.index = index
        self.spec = spec
        self.sparse = spec.sparse
        on_cpu = spec.device.type == "cpu"
        self.hooks_can_copy = on_cpu and spec.dtype is torch.float32 and not spec.sparse
        self.trailer_numel = trailer_numel
        self.slots = tuple(
            Slot(s, parameters[s.index], index, small_bytes) for s in spec.parameters
        )
        self.flat: torch.Tensor | None = None
        self.gradients: torch.Tensor | None = None
        self.trailer: torch.Tensor | None = None
        self.sparse_gradient: torch.Tensor | None = None
        self.pending = self.absent = 0
        self.reduction: Reduction | None = None
        self.future: torch.futures.Future[torch.Tensor] | None = None
        self._views: list[torch.Tensor] = []
        self._free_view_refs = 0
        self._free_storage_refs = (0, 0)
        self._storage: torch.UntypedStorage | None = None

    @property
    def is_unused(self) -> bool:
        """Whether no gradient arrives in this step."""
        return self.absent == len(self.slots)

    @property
    def total_numel(self) -> int:
        """Elements to allocate."""
        return self.spec.numel + self.trailer_numel

    def attach(self, flat: torch.Tensor) -> None:
        """Give the bucket its memory and cut the slots' views."""
        numel = self.spec.numel
        self.flat = flat
        self.gradients = flat[:numel]
        self.trailer = flat[numel:]
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            slot.view = flat.as_strided(
                slot.spec.shape, slot.spec.stride, flat.storage_offset() + offset
            )
        self._storage = flat.untyped_storage()
        self._views = [slot.view for slot in self.slots if slot.view is not None]
        self._free_view_refs = max(map(sys.getrefcount, self._views))
        self._free_storage_refs = self._storage_refs()

    def open(self) -> None:
        """Wait for all gradients of a step."""
        self.pending = len(self.slots)
        self.absent = 0

    def detach(self) -> None:
        """Let go of the memory. Gradients that are views of it keep it alive."""
        self.flat = self.gradients = self.trailer = self._storage = None
        self._views = []
        for slot in self.slots:
            slot.view = None

    def is_held(self) -> bool:
        """Say whether somebody else still holds memory that the next step would overwrite.

        A gradient that is still its parameter's ``grad`` is not held in this sense: there, to be
        overwritten is what accumulation means. Everything else that keeps a view, or a tensor on
        the same storage, alive is a user who wants to see the old value.
        """
        if not self._views:
            return False
        if self._storage_refs() != self._free_storage_refs:
            return True
        # By map, as in attach(): no variable refers to a view, which Python 3.14 would not count.
        counts = list(map(sys.getrefcount, self._views))
        if max(counts) <= self._free_view_refs:
            return False
        return any(
            count > self._free_view_refs and slot.parameter.grad is not slot.view
            for slot, count in zip(self.slots, counts, strict=True)
        )

    def _storage_refs(self) -> tuple[int, int]:
        """Count who refers to the memory: tensors, and users of the storage object itself."""
        assert self._storage is not None
        return storage_references(self._storage), sys.getrefcount(self._storage)

    def scale(self, factor: float) -> None:
        """Multiply all gradients; a factor of zero clears them, NaN or not."""
        if self.sparse_gradient is not None:
            gradient = self.sparse_gradient.coalesce()
            values = gradient.values()
            values.zero_() if factor == 0.0 else values.mul_(factor)
            self.sparse_gradient = gradient
        elif self.gradients is not None:
            self.gradients.zero_() if factor == 0.0 else self.gradients.mul_(factor)

    def accept(self, result: torch.Tensor) -> None:
        """Take over what a hook made of the gradients."""
        if self.sparse:
            self.sparse_gradient = result
        elif self.gradients is not None and result.data_ptr() != self.gradients.data_ptr():
            self.gradients.copy_(result.reshape(-1))


class GradBucket:
    """What a communication hook sees of a bucket; the methods are those of torch's class."""

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's place in the order in which buckets start."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat, not yet divided by the world size."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, as views of :meth:`buffer`."""
        if self._bucket.sparse:
            return [self._buffer]
        base = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(slot.spec.shape, slot.spec.stride, base + offset)
            for slot, offset in zip(self._bucket.slots, self._bucket.spec.offsets, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether no further bucket follows in this step."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let ``buffer`` take the place of the gradients; it must have as many elements."""
        if buffer.numel() != self._buffer.numel():
            raise ValueError(
                f"set_buffer: bucket {self._bucket.index} holds {self._buffer.numel()} elements, "
                f"but the new buffer has {buffer.numel()}. Give a tensor of the same size."
            )
        self._buffer = buffer
