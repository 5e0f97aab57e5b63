"""Buckets: the plan (pure) and the bucket (state)."""

from paceline.buckets.bucket import SMALL_BYTES, Bucket, GradBucket, Slot
from paceline.buckets.plan import (
    UNLIMITED,
    BucketCaps,
    BucketPlan,
    BucketSpec,
    ParameterSpec,
    plan_buckets,
)

__all__ = [
    "SMALL_BYTES",
    "UNLIMITED",
    "Bucket",
    "BucketCaps",
    "BucketPlan",
    "BucketSpec",
    "GradBucket",
    "ParameterSpec",
    "Slot",
    "plan_buckets",
]
