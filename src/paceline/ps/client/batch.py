"""What a module is called with, checked and in one form. Called by the modules; no server here.

A batch of one table is ``Bags``: flat ids, where each bag begins, and perhaps weights. All the
shapes that ``nn.EmbeddingBag`` takes become that.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import BagsError
from paceline.native.extension import native
from paceline.ps.client.row_plan import Ints
from paceline.ps.client.table_config import TableConfig

BATCH = struct.Struct("<4q")
"""Address and count of the ids, then of the offsets; ``pl_batch`` in ``native/ps/plan.h``."""
_INTEGERS = (torch.int64, torch.int32)


class Bags(NamedTuple):
    """A table's batch, with the arguments of ``nn.EmbeddingBag.forward``.

    Args:
        ids: 2-D: each line is a bag. 1-D: with ``offsets``.
        offsets: Where in ``ids`` each bag begins.
        per_sample_weights: One for each id, with ``mode="sum"``.
    """

    ids: Tensor
    offsets: Tensor | None = None
    per_sample_weights: Tensor | None = None


class FlatBags:
    """A checked batch of one table. Tables that got the same tensors may have the same one.

    Args:
        ids: Flat, int64, contiguous, on the CPU.
        offsets: The same: where each bag begins; None: each id stands for itself
            (``nn.Embedding``).
        weights: One for each id, or None.
        shape: Of the ids as they came.
        device: Where they came from.

    Attributes:
        count: How many ids.
        bags: How many bags.
        packed: Where ids and offsets are, for the native core.
        form: What decides, with the table, which others it is looked up with.
    """

    __slots__ = ("bags", "count", "device", "form", "ids", "offsets", "packed", "shape", "weights")

    def __init__(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        shape: torch.Size,
        device: torch.device,
    ) -> None:
        self.ids = ids
        self.offsets = offsets
        self.weights = weights
        self.shape = shape
        self.device = device
        self.count = ids.numel()
        self.bags = 0 if offsets is None else offsets.numel()
        begin = 0 if offsets is None else offsets.data_ptr()
        self.packed = BATCH.pack(ids.data_ptr(), self.count, begin, self.bags)
        self.form = (weights is not None, offsets is not None)

    @property
    def ids_array(self) -> Ints:
        """The ids as numpy has them."""
        found: Ints = self.ids.numpy()
        return found

    @property
    def offsets_array(self) -> Ints:
        """The offsets as numpy has them; there are some."""
        assert self.offsets is not None
        found: Ints = self.offsets.numpy()
        return found


Reading = tuple[bool, str, torch.dtype]
"""What ``flat_bags`` asks a config for, besides its name."""


def reading_of(config: TableConfig) -> Reading:
    """Tables with the same one read the same bags in the same way."""
    return config.include_last_offset, config.mode, config.dtype


def is_same(one: Any, other: Any) -> bool:
    """Say whether two inputs are the same tensors, without looking into them."""
    is_bags = type(one) is Bags and type(other) is Bags
    return is_bags and all(a is b for a, b in zip(one, other, strict=True))


def flat_ids(name: str, ids: Tensor) -> FlatBags:
    """The input of ``nn.Embedding``: any shape, each id stands for itself."""
    _check_integers(name, "ids", ids)
    return FlatBags(_int64(ids.reshape(-1)), None, None, ids.shape, ids.device)


def flat_bags(config: TableConfig, batch: Tensor | Bags | tuple[Tensor, ...]) -> FlatBags:
    """The input of ``nn.EmbeddingBag``, checked as there.

    Raises:
        BagsError: It is none.
    """
    ids, offsets, weights = Bags(batch) if isinstance(batch, Tensor) else Bags(*batch)
    _check_integers(config.name, "ids", ids)
    if weights is not None:
        _check_weights(config, ids, weights)
        weights = weights.reshape(-1)
    if ids.dim() == 2:
        if offsets is not None:
            raise _wrong(config, "if input is 2D, then offsets has to be None: each line is a bag")
        return FlatBags(_int64(ids.reshape(-1)), _lines(ids), weights, ids.shape, ids.device)
    if ids.dim() != 1:
        raise _wrong(
            config, f"input has to be 1D or 2D Tensor, but got Tensor of dimension {ids.dim()}"
        )
    if offsets is None:
        raise _wrong(config, "offsets has to be a 1D Tensor but got None; it says where bags begin")
    return _with_offsets(config, ids, offsets, weights)


def _with_offsets(
    config: TableConfig, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> FlatBags:
    _check_integers(config.name, "offsets", offsets)
    if offsets.dim() != 1:
        raise _wrong(config, f"offsets has to be a 1D Tensor, not {offsets.dim()}D")
    found, starts = _int64(ids), _int64(offsets)
    if config.include_last_offset:
        found, starts, weights = _without_last(config, found, starts, weights)
    _check_offsets(config, starts, found.numel())
    return FlatBags(found, starts, weights, ids.shape, ids.device)


def _without_last(
    config: TableConfig, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last offset says where the ids end; what is behind it is in no bag."""
    if not len(offsets):
        raise _wrong(config, "include_last_offset: number of offset should be at least 1")
    end = int(offsets[-1])
    if not 0 <= end <= len(ids):
        raise _last_offset(config, end, len(ids))
    return ids[:end], offsets[:-1], None if weights is None else weights[:end]


def _check_offsets(config: TableConfig, offsets: Tensor, ids: int) -> None:
    bags = offsets.numel()
    if native is None or not native.are_offsets(offsets.data_ptr(), bags, ids):
        _explain_offsets(config, offsets.numpy(), ids)


def _explain_offsets(config: TableConfig, offsets: Ints, ids: int) -> None:
    """Say what is wrong with offsets, if anything is."""
    if not len(offsets):
        if ids:
            raise _wrong(config, f"there are {ids} ids and no bag")
        return
    if offsets[0] != 0:
        raise _wrong(
            config, f"offsets[0] has to be 0: the first bag begins there. However, got {offsets[0]}"
        )
    if offsets[-1] > ids:
        raise _last_offset(config, offsets[-1], ids)
    if (offsets[1:] < offsets[:-1]).any():
        raise _wrong(config, "offsets grow from bag to bag")


def _last_offset(config: TableConfig, offset: int, ids: int) -> BagsError:
    return _wrong(
        config,
        f"offsets[-1] can not be greater than input's length {ids} but got offsets[-1] of {offset}"
        if offset >= 0
        else f"offsets[-1] is {offset}: offsets grow from 0",
    )


def _check_weights(config: TableConfig, ids: Tensor, weights: Tensor) -> None:
    if config.mode != "sum":
        raise _wrong(
            config,
            f"per_sample_weights is only supported for mode='sum' (got mode='{config.mode}')",
        )
    if weights.shape != ids.shape:
        raise _wrong(
            config,
            f"If per_sample_weights ({weights.shape}) is not None, then it must have the same "
            f"shape as the input ({ids.shape})",
        )
    if weights.dtype != config.dtype:
        raise _wrong(
            config,
            "expected rows to have the same type as tensor for argument #1 'per_sample_weights'; "
            f"but rows are {config.dtype}, and weights {weights.dtype}",
        )


def _check_integers(table: str, what: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS:
        found = tensor.type() if isinstance(tensor, Tensor) else type(tensor).__name__
        raise BagsError(
            f"table {table!r}: expected {what} to have one of the following scalar types: "
            f"Long, Int; but got {found} instead"
        )


def _lines(ids: Tensor) -> Tensor:
    lines, width = ids.shape
    return torch.arange(lines) * width


def _int64(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.int64 and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", torch.int64).contiguous()


def _wrong(config: TableConfig, text: str) -> BagsError:
    return BagsError(f"table {config.name!r}: {text}")
