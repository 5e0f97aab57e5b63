"""What becomes of a step whose buckets are reduced: judged, divided by weights, left out, shown.

Called by the reducer once all buckets have landed. All ranks have the same control block and the
same sums, so they come to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import Bucket
from paceline.config import NonFinite, ReducePolicy
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.nonfinite import overflowed_slots
from paceline.ddp.agree.peers import Peers, Verdict
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.agree.weights import WeightedMean
from paceline.ddp.reduce.publish import settle
from paceline.ddp.reduce.step import Step


class Conclusion:
    """Ends steps. Owned by the reducer; holds on to no bucket."""

    def __init__(self, peers: Peers, world: int) -> None:
        self._peers = peers
        self._world = world
        self.weighted_mean = WeightedMean()

    def conclude(
        self,
        step: Step,
        block: ControlBlock,
        buckets: Sequence[Bucket],
        policy: ReducePolicy,
        drift: Drift,
        *,
        has_hook: bool,
    ) -> bool:
        """Let the outside show the results. Return whether the step was left out.

        Raises:
            StepError: If the step failed on some rank; the same error on every rank.
        """
        verdict = self._peers.judge(block, step.failure, policy, drift)
        if step.weight is not None:
            multiplier = float(self._world) if has_hook else 1.0
            self.weighted_mean.finish(buckets, block, multiplier=multiplier)
        is_skipped = verdict is Verdict.SKIP
        if not is_skipped and policy.nonfinite is not NonFinite.IGNORE:
            is_skipped = self._has_overflowed(step, buckets, policy, has_hook=has_hook)
        if is_skipped:
            for bucket in buckets:
                bucket.scale(0.0)
        elif step.zeroed:
            _zero(step, buckets)
        settle(step, block, buckets)
        return is_skipped

    def _has_overflowed(
        self, step: Step, buckets: Sequence[Bucket], policy: ReducePolicy, *, has_hook: bool
    ) -> bool:
        """Gradients that are finite on every rank may have a sum that is not; all ranks see it."""
        slots = overflowed_slots(buckets, has_hook=has_hook)
        if slots and policy.nonfinite is NonFinite.RAISE:
            step.fail(FailureKind.NONFINITE, slots, "finite on every rank, but their sum is not")
            assert step.failure is not None
            raise self._peers.error_for([step.failure], policy)
        return bool(slots)


def _zero(step: Step, buckets: Sequence[Bucket]) -> None:
    """Clear what another step, which was left out, has in common with this one."""
    for bucket in buckets:
        for slot in bucket.slots:
            if slot.index in step.zeroed:
                bucket.scale(0.0) if bucket.sparse else slot.zero()
