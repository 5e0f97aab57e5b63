"""What a wrapper was asked to do: picklable, and enough to build its parts again."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.buckets import BucketCaps
from paceline.config import ReducePolicy, TransportChoice
from paceline.ddp.arguments import BufferArguments, Placement
from paceline.torch_private import MixedPrecisionConfig


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments after checks."""

    policy: ReducePolicy
    caps: BucketCaps
    placement: Placement
    buffers: BufferArguments
    mixed_precision: MixedPrecisionConfig | None
    transport: TransportChoice
