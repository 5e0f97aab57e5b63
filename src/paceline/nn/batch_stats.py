"""Batch normalisation over all ranks as one differentiable function, for any device.

Called by :mod:`paceline.nn.sync_batchnorm`, which decides when it is needed and owns parameters and
running statistics. One all_gather in forward, one all_reduce in backward; every rank takes part in
both, with an empty batch too.

[Note: one message]
Each rank sends the mean and the variance of its own values and their count, and combines what all
have sent: var = Σ wᵢ (varᵢ + (meanᵢ - mean)²) with wᵢ = countᵢ / Σ count. A sum of sums of squares
would travel in an all_reduce as well, but cancels where the mean is large. The combination runs on
few numbers, in the same order on every rank, so all have the same bits. In backward each rank needs
Σ dy and Σ dy·x̂ over all ranks, which are sums of plain sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from paceline.nn.exchange import Exchange
from paceline.types import ShardExchange


class BatchStats(NamedTuple):
    """Mean and biased variance of each channel, and over how many values."""

    mean: torch.Tensor
    var: torch.Tensor
    total: torch.Tensor


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what statistics of values of this dtype are computed in."""
    return torch.promote_types(dtype, torch.float32)


def local_stats(values: torch.Tensor) -> BatchStats:
    """Compute the statistics of this rank's values; zeros where there are none."""
    dtype = stats_dtype(values.dtype)
    channels = values.size(1)
    count = values.new_full((1,), values.numel() // channels, dtype=dtype)
    zeros = values.new_zeros(channels, dtype=dtype)
    if values.numel() == 0:
        return BatchStats(zeros, zeros, count)
    if values.device.type == "cpu":
        # One pass, and fast for channels-last too; it takes its dtype from the running statistics.
        mean, var = torch.batch_norm_update_stats(values, zeros, zeros.clone(), 0.0)
        return BatchStats(mean, var, count)
    dims = [dim for dim in range(values.dim()) if dim != 1]
    var, mean = torch.var_mean(values.to(dtype), dims, correction=0)
    return BatchStats(mean, var, count)


def gather_stats(mine: BatchStats, exchange: Exchange | ShardExchange) -> BatchStats:
    """Combine the statistics of all ranks, or of all shards: one collective."""
    return combine(exchange.gather(torch.cat(mine)))


def combine(rows: torch.Tensor) -> BatchStats:
    """Combine statistics, one row for each rank: means, variances, count."""
    channels = (rows.size(1) - 1) // 2
    wide = rows.double() if rows.device.type == "cpu" else rows
    means, variances, counts = wide.split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    weights = counts / total.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return BatchStats(mean.to(rows.dtype), var.to(rows.dtype), total.to(rows.dtype))


class NormalizeOverRanks(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``; mean and var depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        stats: BatchStats,
        eps: float,
        exchange: Exchange | ShardExchange,
    ) -> torch.Tensor:
        """Normalise; ``stats`` are those of all ranks."""
        context: Any = ctx
        mean, var, total = stats
        invstd = (var + eps).rsqrt()
        context.save_for_backward(x, weight, mean, invstd, total)
        context.exchange = exchange
        if x.numel() == 0:
            return torch.empty_like(x)
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return F.batch_norm(x, mean, var, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Exchange the two sums that every rank's gradient depends on."""
        x, weight, mean, invstd, total = ctx.saved_tensors
        sums = _local_sums(dy, x, mean, invstd)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xhat = sums.clone()
        dx = None
        if needs_x or ctx.exchange.always_sums:
            ctx.exchange.sum(sums)
        if needs_x:
            dx = _input_gradient(dy, x, weight, mean, invstd, sums / total.clamp(min=1))
        # Of this rank alone: the wrapper around the model averages them, like all gradients.
        dweight = sum_dy_xhat.to(weight.dtype) if needs_weight else None
        dbias = sum_dy.to(dy.dtype if weight is None else weight.dtype) if needs_bias else None
        return dx, dweight, dbias, None, None, None


def _local_sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> torch.Tensor:
    """Return Σ dy and Σ dy·x̂ per channel, as two rows."""
    if x.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    ones = torch.ones_like(mean)  # gives the sums the dtype of the statistics
    mask = [False, True, True]
    _, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy.contiguous(memory_format=_memory_format(x)), x, ones, None, None, mean, invstd, True,
        0.0, mask,
    )  # fmt: skip
    return torch.stack([sum_dy, sum_dy_xhat])


def _input_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    means: torch.Tensor,
) -> torch.Tensor:
    """Return w·invstd·(dy - mean(dy) - x̂·mean(dy·x̂)); ``means`` are over all ranks."""
    if x.numel() == 0:
        return torch.empty_like(x)
    scale = invstd if weight is None else weight.to(invstd.dtype) * invstd
    shape = [1, -1] + [1] * (x.dim() - 2)
    dx = dy * scale.view(shape)
    slope = (-scale * invstd * means[1]).view(shape)
    dx = dx.addcmul_(x - mean.view(shape), slope)
    return dx.sub_((scale * means[0]).view(shape)).to(x.dtype)


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    for dims, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format
