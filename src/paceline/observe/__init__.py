"""What can be seen of a running wrapper."""

from paceline.observe.stats import BucketStats, DDPStats, StepClock

__all__ = ["BucketStats", "DDPStats", "StepClock"]
