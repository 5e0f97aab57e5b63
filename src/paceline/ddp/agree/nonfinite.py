"""Is a gradient finite? One pass over a bucket; names only when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.buckets import Bucket, Slot


def is_finite(tensor: torch.Tensor) -> bool:
    """Say whether a tensor holds neither NaN nor infinity, in one pass without temporaries."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def bucket_is_finite(bucket: Bucket) -> bool:
    """Say whether all of a bucket's gradients are finite."""
    content = bucket.sparse_gradient if bucket.sparse else bucket.gradients
    return content is None or is_finite(content)


def nonfinite_slots(bucket: Bucket) -> list[Slot]:
    """Return the slots whose gradients are not finite."""
    if bucket.sparse:
        return [] if bucket_is_finite(bucket) else list(bucket.slots)
    return [s for s in bucket.slots if s.view is not None and not is_finite(s.view)]


def overflowed_slots(buckets: Sequence[Bucket], *, always: bool) -> list[Slot]:
    """Return slots whose reduced gradients are not finite, in buckets where a sum may overflow.

    As a mean is taken, only float16 makes infinity out of finite gradients, or a hook that
    compresses; ``always`` looks at all buckets.
    """
    for bucket in buckets:
        can_overflow = always or bucket.spec.dtype is torch.float16
        if can_overflow and not bucket_is_finite(bucket):
            return nonfinite_slots(bucket)
    return []
