"""Which parameter goes into which bucket at which offset: a pure function of its arguments.

Called by ddp/reduce/planner.py, once at construction and once more when the order of arrival is
known. Knows nothing about groups, hooks or autograd, and holds no tensor: a plan can be printed,
compared and hashed, and two ranks have the same plan exactly if :attr:`BucketPlan.digest` is equal.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any

import torch

from paceline.errors import ConfigurationError

MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = MIB
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class BucketCaps:
    """How large buckets may become before the next parameter opens a new one.

    Attributes:
        cap_bytes: The size of an ordinary bucket.
        first_cap_bytes: The size of the first; small, so that the first reduction starts early.
        listed: Sizes one by one (``bucket_cap_mb_list``); the last one repeats. Empty: not given.
    """

    cap_bytes: int = DEFAULT_CAP_MB * MIB
    first_cap_bytes: int = FIRST_CAP_BYTES
    listed: tuple[int, ...] = ()

    @classmethod
    def from_megabytes(
        cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None
    ) -> BucketCaps:
        """Translate the constructor's arguments; they may be fractions.

        Raises:
            ConfigurationError: If a size is negative or no number.
        """
        for cap in cap_mb_list or [cap_mb if cap_mb is not None else 0.0]:
            if not 0.0 <= cap < float("inf"):
                name = "bucket_cap_mb_list" if cap_mb_list else "bucket_cap_mb"
                raise ConfigurationError(
                    f"{name} holds {cap}, which is no size of a bucket. Write mebibytes, not "
                    f"negative, for example bucket_cap_mb={DEFAULT_CAP_MB}."
                )
        if cap_mb_list:
            listed = tuple(int(cap * MIB) for cap in cap_mb_list)
            return cls(max(listed), max(listed), listed)
        if cap_mb is None:
            return cls()
        return cls(int(cap_mb * MIB), int(cap_mb * MIB))

    def initial(self, *, order_unknown: bool) -> tuple[int, ...]:
        """Caps for the plan at construction.

        While nobody knows in which order gradients arrive, one bucket holds all: a bucket cut at a
        guess could start early on one rank and meet another collective of the model on its peers.
        """
        if self.listed:
            return self.listed
        return (UNLIMITED,) if order_unknown else (self.first_cap_bytes, self.cap_bytes)

    def rebuilt(self) -> tuple[int, ...]:
        """Caps for the plan that follows the order of arrival."""
        return self.listed or (self.first_cap_bytes, self.cap_bytes)


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan needs to know about one parameter.

    ``dtype`` is the dtype that is reduced, which mixed precision may choose; ``stride`` is that of
    the parameter when it is dense without overlap, else that of a contiguous tensor.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Elements in the gradient."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the gradient as it is reduced."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(
        cls,
        index: int,
        name: str,
        parameter: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        sparse: bool = False,
    ) -> ParameterSpec:
        """Describe a parameter; ``dtype`` overrides its own."""
        dense = _is_dense(parameter)
        like = parameter if dense else torch.empty(parameter.shape, device="meta")
        shape, stride = tuple(parameter.shape), tuple(like.stride())
        return cls(index, name, shape, stride, dtype or parameter.dtype, parameter.device, sparse)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements fill one block of memory, each place once."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class BucketSpec:
    """One bucket: its parameters in order, each with its offset in elements."""

    parameters: tuple[ParameterSpec, ...]
    cap_bytes: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter's gradient begins, in elements."""
        ends = [0]
        for spec in self.parameters:
            ends.append(ends[-1] + spec.numel)
        return tuple(ends[:-1])

    @cached_property
    def numel(self) -> int:
        """Elements of gradients, without what else may ride along."""
        return sum(spec.numel for spec in self.parameters)

    @cached_property
    def largest_numel(self) -> int:
        """Elements of its largest gradient."""
        return max(spec.numel for spec in self.parameters)

    @cached_property
    def dtype(self) -> torch.dtype:
        """All of a bucket has one dtype."""
        return self.parameters[0].dtype

    @cached_property
    def device(self) -> torch.device:
        """All of a bucket lies on one device."""
        return self.parameters[0].device

    @cached_property
    def sparse(self) -> bool:
        """A sparse gradient has a bucket of its own."""
        return self.parameters[0].sparse

    @cached_property
    def nbytes(self) -> int:
        """Bytes of gradients."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, in the order in which their reductions start."""

    buckets: tuple[BucketSpec, ...]

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if they cut the same gradients in the same way."""
        strides = [spec.stride for bucket in self.buckets for spec in bucket.parameters]
        text = "\n".join([*self.describe(), str(strides)])
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> list[str]:
        """One line per bucket, for errors and the digest. No devices: ranks differ in them."""
        lines = []
        for number, bucket in enumerate(self.buckets):
            members = ", ".join(f"{s.name}{list(s.shape)}" for s in bucket.parameters)
            kind = "sparse " if bucket.sparse else ""
            lines.append(f"bucket {number}: {kind}{bucket.dtype} {bucket.nbytes} bytes: {members}")
        return lines

    def order(self) -> tuple[int, ...]:
        """Parameter indices, bucket after bucket."""
        return tuple(spec.index for bucket in self.buckets for spec in bucket.parameters)


@dataclass
class _OpenBucket:
    """A bucket that still takes parameters, while a plan is made."""

    members: list[ParameterSpec] = field(default_factory=list)
    nbytes: int = 0
    last_position: int = 0

    def add(self, spec: ParameterSpec, position: int) -> None:
        self.members.append(spec)
        self.nbytes += spec.nbytes
        self.last_position = position


def plan_buckets(
    specs: Iterable[ParameterSpec], caps_bytes: Sequence[int], *, by_arrival: bool
) -> BucketPlan:
    """Cut parameters into buckets of one dtype and device each.

    Args:
        specs: The parameters, in order of definition or in the order their gradients arrive.
        caps_bytes: A bucket is closed when it has reached its cap; the last cap repeats. Every
            (dtype, device) counts its own buckets.
        by_arrival: The order is the order of arrival, so buckets are sorted by when they are full.
            Otherwise gradients are expected in the reverse of the order of definition.
    """
    full: list[tuple[int, BucketSpec]] = []
    still_open: dict[tuple[torch.dtype, torch.device], _OpenBucket] = {}
    caps: defaultdict[Any, Iterator[int]] = defaultdict(
        lambda: chain(caps_bytes, repeat(caps_bytes[-1]))
    )
    current_cap: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, spec in enumerate(specs):
        if spec.sparse:
            full.append((position, BucketSpec((spec,), cap_bytes=0)))
            continue
        key = (spec.dtype, spec.device)
        if key not in still_open:
            still_open[key] = _OpenBucket()
            current_cap[key] = next(caps[key])
        still_open[key].add(spec, position)
        if still_open[key].nbytes >= current_cap[key]:
            done = still_open.pop(key)
            full.append((position, BucketSpec(tuple(done.members), current_cap[key])))
    for key, rest in still_open.items():
        full.append((rest.last_position, BucketSpec(tuple(rest.members), current_cap[key])))
    full.sort(key=lambda entry: entry[0])
    buckets = [bucket for _, bucket in full]
    return BucketPlan(tuple(buckets if by_arrival else reversed(buckets)))
