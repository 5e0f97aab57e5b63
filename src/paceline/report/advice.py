"""What follows from the bucket table: one sentence for each thing that a user can change.

Every rule looks at summaries only and says nothing unless there is something to gain. Called by
analysis.py; must not know about HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.printable import listed, size_text
from paceline.report.buckets import BucketSummary, Overlap

# A gain below this share of a step is not worth a change.
MIN_GAIN = 0.03
# Sums of fewer bytes cost their latency, not their bandwidth.
SMALL_BYTES = 256 * 1024
MANY_SMALL = 8
MIB = 1024 * 1024


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Attributes:
        rule: Its name, for programs.
        text: What to do, and why.
        gain_ms: What a step could gain, at most.
    """

    rule: str
    text: str
    gain_ms: float


@dataclass(frozen=True)
class Situation:
    """What the rules look at: one wrapper's buckets, and the step around them."""

    buckets: tuple[BucketSummary, ...]
    overlap: Overlap
    step_ms: float
    transport: str
    is_across_hosts: bool

    @property
    def min_gain_ms(self) -> float:
        return MIN_GAIN * self.step_ms

    @property
    def exposed_ms(self) -> float:
        return sum(bucket.exposed_ms for bucket in self.buckets)

    @property
    def reduce_ms(self) -> float:
        return sum(bucket.reduce_ms for bucket in self.buckets)


def advise(situation: Situation) -> tuple[Advice, ...]:
    """Return what is worth a change, the largest gain first."""
    if not situation.buckets:
        return ()
    found = [advice for rule in RULES if (advice := rule(situation)) is not None]
    return tuple(sorted(found, key=lambda advice: -advice.gain_ms))


def _one_bucket(now: Situation) -> Advice | None:
    if len(now.buckets) > 1 or now.exposed_ms < now.min_gain_ms:
        return None
    size = now.buckets[0].bytes / MIB
    return Advice(
        "one-bucket",
        f"All gradients ({size_text(now.buckets[0].bytes)}) are in one bucket, so nothing can be "
        f"reduced before backward ends. Try bucket_cap_mb={_cap(size / 4)}.",
        now.exposed_ms * 0.75,
    )


def _last_bucket(now: Situation) -> Advice | None:
    last = now.buckets[-1]
    mean = sum(bucket.bytes for bucket in now.buckets) / len(now.buckets)
    is_large = len(now.buckets) > 1 and last.bytes > mean / 2
    if not is_large or last.exposed_ms < now.min_gain_ms:
        return None
    return Advice(
        "last-bucket",
        f"The last bucket ({size_text(last.bytes)}) is complete only when backward ends: nothing "
        f"hides its {last.exposed_ms:.3g} ms. Make the buckets smaller: bucket_cap_mb="
        f"{_cap(max(bucket.bytes for bucket in now.buckets) / MIB / 2)}.",
        last.exposed_ms * 0.5,
    )


def _first_bucket(now: Situation) -> Advice | None:
    first = now.buckets[0]
    is_late = len(now.buckets) > 1 and first.ready_ms > 0.5 * now.overlap.backward_ms
    if not is_late or now.exposed_ms < now.min_gain_ms or first.is_ready_at_end:
        return None
    return Advice(
        "first-bucket",
        f"The first bucket ({size_text(first.bytes)}) is ready only after {first.ready_ms:.3g} ms "
        f"of {now.overlap.backward_ms:.3g} ms of backward; until then nothing is reduced. Make it "
        f"smaller: bucket_cap_mb_list=[{_cap(first.bytes / MIB / 8)}, {_cap(first.bytes / MIB)}].",
        min(now.exposed_ms, first.ready_ms) * 0.5,
    )


def _small_buckets(now: Situation) -> Advice | None:
    small = [bucket for bucket in now.buckets if bucket.bytes < SMALL_BYTES]
    gain = sum(bucket.exposed_ms for bucket in small) * 0.5
    if len(small) < MANY_SMALL or gain < now.min_gain_ms:
        return None
    return Advice(
        "small-buckets",
        f"{len(small)} buckets are smaller than {size_text(SMALL_BYTES)}: each costs a round of "
        "its own. Use a larger bucket_cap_mb.",
        gain,
    )


def _slow_link(now: Situation) -> Advice | None:
    is_slow = now.reduce_ms > now.overlap.backward_ms and now.exposed_ms > 0.1 * now.step_ms
    if not is_slow or now.transport == "shm":
        return None
    return Advice(
        "slow-link",
        f"Reductions take {now.reduce_ms:.3g} ms, longer than backward "
        f"({now.overlap.backward_ms:.3g} ms): no order of buckets hides them. Send less: "
        "hooks.bf16_compress_hook halves the bytes; hooks.choose measures which hook pays on this "
        "link.",
        now.exposed_ms * 0.5,
    )


def _not_shared(now: Situation) -> Advice | None:
    is_local = now.transport.startswith("c10d") and not now.is_across_hosts
    if not is_local or now.exposed_ms < now.min_gain_ms:
        return None
    return Advice(
        "not-shared",
        f"All ranks run on one host, but gradients travel over {now.transport}. Shared memory is "
        'faster: transport="auto" uses it where it can, and says why where it cannot.',
        now.exposed_ms * 0.5,
    )


def _out_of_order(now: Situation) -> Advice | None:
    late = [
        (bucket, after)
        for bucket, after in zip(now.buckets, now.buckets[1:], strict=False)
        if bucket.ready_ms > after.ready_ms + 0.05 * max(now.overlap.backward_ms, 0.01)
    ]
    if not late or now.exposed_ms < now.min_gain_ms:
        return None
    bucket, after = max(late, key=lambda pair: pair[0].ready_ms - pair[1].ready_ms)
    if bucket.is_ready_at_end:
        why = (
            "it is complete only at the end of backward, which is what unused parameters look like"
        )
        what = "freeze them (requires_grad=False), or leave them out of the model"
    else:
        why = "autograd computes its gradients in another order than planned"
        what = "static_graph=True plans the buckets by the first backward"
    return Advice(
        "out-of-order",
        f"Bucket {bucket.index} is ready {bucket.ready_ms - after.ready_ms:.3g} ms after bucket "
        f"{after.index}, which waits for it: {why} ({_names(bucket)}). "
        f"{what[0].upper()}{what[1:]}.",
        min(now.exposed_ms, bucket.ready_ms - after.ready_ms),
    )


RULES: Sequence[Callable[[Situation], Advice | None]] = (
    _one_bucket,
    _last_bucket,
    _first_bucket,
    _small_buckets,
    _slow_link,
    _not_shared,
    _out_of_order,
)


def _cap(mib: float) -> str:
    """A bucket cap in MiB, rounded to what a person would write."""
    if mib >= 2:
        return f"{mib:.0f}"
    return f"{max(mib, 0.01):.1g}"


def _names(bucket: BucketSummary) -> str:
    return listed(bucket.parameters, 2) or "parameters unknown"
