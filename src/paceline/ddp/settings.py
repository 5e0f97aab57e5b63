"""What a wrapper was asked to do: picklable, and enough to build its parts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.buckets import BucketCaps
from paceline.config import (
    GradientViews,
    MissingGradients,
    NonFinite,
    ReducePolicy,
    TransportChoice,
    parse_choice,
)
from paceline.ddp import arguments
from paceline.ddp.arguments import BufferArguments, Placement
from paceline.torch_private.modules import MixedPrecisionConfig


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments after checks."""

    policy: ReducePolicy
    caps: BucketCaps
    placement: Placement
    buffers: BufferArguments
    mixed_precision: MixedPrecisionConfig | None
    transport: TransportChoice


def choose_settings(
    given: Mapping[str, Any], on_devices: Sequence[torch.Tensor], buffers: BufferArguments
) -> Settings:
    """Check the constructor's arguments and translate them.

    Args:
        given: All of them, by their names; their types are checked.
        on_devices: The parameters that say where the module is.
        buffers: Translated already: its warnings name the caller's line.

    Raises:
        ConfigurationError: If one of them means nothing.
    """
    return Settings(
        policy=ReducePolicy(
            views=GradientViews.from_argument(given["gradient_as_bucket_view"]),
            find_unused=bool(given["find_unused_parameters"]),
            static_graph=bool(given["static_graph"]),
            skip_unused=bool(given["skip_all_reduce_unused_params"]),
            nonfinite=parse_choice(NonFinite, "nonfinite", given["nonfinite"]),
            missing=parse_choice(MissingGradients, "missing_gradients", given["missing_gradients"]),
            batched_copy=bool(given["batched_grad_copy"]),
            lazy_buckets=bool(given["lazy_bucket_allocation"]),
            check_every=arguments.choose_interval(given["check_every"]),
            shards=given["shards"],
        ),
        caps=BucketCaps.from_megabytes(given["bucket_cap_mb"], given["bucket_cap_mb_list"]),
        placement=arguments.choose_placement(
            on_devices, given["device_ids"], given["output_device"]
        ),
        buffers=buffers,
        mixed_precision=given["mixed_precision"],
        transport=arguments.choose_transport(given["transport"]),
    )
