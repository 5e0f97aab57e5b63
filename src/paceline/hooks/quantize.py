"""torch's quantisation hooks, by their names and with their numbers.

Every rank sends its whole bucket, as uint8 with an affine scale, to every other rank: bytes grow
with the number of ranks. They are here for scripts that use them; :mod:`paceline.hooks.quantized`
is the one to choose. Other than torch's, they run on gloo, and send scales and codes at once.

An affine scale maps the smallest value (or 0, if that is smaller) to 0 and the largest to 255; the
error is at most half of the 1/255 of that range, per tensor or per channel of values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from paceline.errors import ConfigurationError
from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    after,
    check_gradients,
    comm_hook,
    done,
    group_of,
    start_all_gather,
)

_STEPS = 255.0
_EPSILON = torch.finfo(torch.float32).eps  # the least scale, as torch's observers have it


@comm_hook
def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: HookBucket
) -> TensorFuture:
    """Exchange gradients in uint8, with one scale for the bucket of each rank."""
    buffer = check_gradients("quantization_pertensor_hook", bucket, allow_complex=False)
    return _exchange(process_group, buffer, buffer.view(1, -1).float())


@comm_hook
def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: HookBucket, bucket_size: int = 512
) -> TensorFuture:
    """Exchange gradients in uint8, with a scale for every ``bucket_size`` values."""
    buffer = check_gradients("quantization_perchannel_hook", bucket, allow_complex=False)
    if type(bucket_size) is not int or bucket_size < 1:
        raise ConfigurationError(
            f"quantization_perchannel_hook: bucket_size is an int above 0, not {bucket_size!r}"
        )
    padding = -buffer.numel() % bucket_size
    return _exchange(
        process_group, buffer, F.pad(buffer.float(), (0, padding)).view(-1, bucket_size)
    )


def _exchange(
    process_group: dist.ProcessGroup | None, buffer: torch.Tensor, channels: torch.Tensor
) -> TensorFuture:
    if not buffer.numel():
        return done(buffer)
    group = group_of(process_group)
    scales, zeros = _affine(channels)
    codes = torch.round(channels / scales).add_(zeros).clamp_(0, _STEPS).to(torch.uint8)
    header = torch.cat([scales, zeros]).view(torch.uint8).view(-1)
    mine = torch.cat([header, codes.view(-1)])
    everybody = mine.new_empty(group.size(), mine.numel())

    def mean() -> torch.Tensor:
        total = torch.zeros_like(channels)
        for row in everybody:
            # Copied: codes of any number may stand before, so it need not be aligned.
            numbers = row[: header.numel()].clone().view(torch.float32).view(2, -1, 1)
            read = row[header.numel() :].view(channels.shape).float()
            total.add_(read.sub_(numbers[1]).mul_(numbers[0]))
        total.div_(group.size())
        return buffer.copy_(total.view(-1)[: buffer.numel()])

    return after(start_all_gather(everybody, mine, group), mean)


def _affine(channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of each row, as float32 columns."""
    low = channels.amin(dim=1, keepdim=True).clamp_(max=0.0)
    high = channels.amax(dim=1, keepdim=True).clamp_(min=0.0)
    scales = ((high - low) / _STEPS).clamp_(min=_EPSILON)
    zeros = torch.round(-low / scales).clamp_(0, _STEPS)
    return scales, zeros
