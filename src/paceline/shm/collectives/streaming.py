"""Large scaled copies past the caches, by the native core (``native/group/streaming.c``)."""

from __future__ import annotations

import torch

from paceline.native.extension import native

LARGE_BYTES: int = 0 if native is None else native.STREAM_BYTES
"""Below this torch is as fast."""


def scale_into(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """``target = source * factor``: the same bits as ``torch.mul``, whichever way is taken."""
    if _can_stream(target, source):
        native.scale_f32(target.data_ptr(), source.data_ptr(), source.numel(), factor)
    else:
        torch.mul(source, factor, out=target)


def _can_stream(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        native is not None
        and source.nbytes >= LARGE_BYTES
        and source.dtype is target.dtype is torch.float32
        and source.device.type == target.device.type == "cpu"
        and source.layout is torch.strided
        and source.stride() == target.stride()
        and source.is_contiguous()
        and type(source) is torch.Tensor
        and not source.is_conj()
        and not source.is_neg()
    )
