"""The immutable summary that ``ddp.stats()`` returns.

Written by ddp/reduce/snapshot.py, read by users. Must not know about groups or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketStats:
    """One bucket in the most recent reduced step. Times are milliseconds since backward began.

    Attributes:
        index: Its place in the order in which reductions start.
        bytes: Bytes of gradients.
        parameters: Names of the parameters, in the bucket's order.
        ready_ms: When its last gradient arrived.
        began_ms: When its reduction, or its hook, was started.
        ended_ms: When the reduced values were there.
        exposed_ms: The part of the reduction that backward did not hide.
        last_rank: The rank on which the bucket was ready last; -1 before the first step.
    """

    index: int
    bytes: int
    parameters: tuple[str, ...]
    ready_ms: float = 0.0
    began_ms: float = 0.0
    ended_ms: float = 0.0
    exposed_ms: float = 0.0
    last_rank: int = -1


@dataclass(frozen=True)
class DDPStats:
    """What ``ddp.stats()`` returns: a snapshot that never changes.

    Attributes:
        steps: Steps reduced so far, skipped ones included.
        skipped_steps: Steps left out by ``nonfinite="skip"``.
        transport: What the buckets travel over: ``"shm"``, ``"c10d:gloo"`` and so on.
        transport_reason: Why that and nothing else.
        buckets: One entry per bucket, in the order in which they start.
        backward_ms: How long the most recent backward computed, without waiting for buckets.
        exposed_ms: Milliseconds at the end of that backward spent waiting for reductions.
        reduced_bytes: Bytes of gradients this rank has reduced since construction.
    """

    steps: int
    skipped_steps: int
    transport: str
    transport_reason: str
    buckets: tuple[BucketStats, ...]
    backward_ms: float
    exposed_ms: float
    reduced_bytes: int
