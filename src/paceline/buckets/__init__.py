"""Buckets: the plan (pure) and the bucket (state)."""

from paceline.buckets.bucket import Bucket, GradBucket, Slot
from paceline.buckets.plan import BucketCaps, BucketPlan, ParameterSpec, plan_buckets

__all__ = [
    "Bucket",
    "BucketCaps",
    "BucketPlan",
    "GradBucket",
    "ParameterSpec",
    "Slot",
    "plan_buckets",
]
