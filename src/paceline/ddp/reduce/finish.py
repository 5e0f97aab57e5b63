"""What becomes of a step whose buckets are reduced: checked, divided by weights, left out, shown.

Called by :mod:`paceline.ddp.reduce.step_runner` once all buckets are reduced. All ranks have the
same control block and the same sums, so they come to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.buckets import Bucket
from paceline.config import NonFinite
from paceline.ddp.agree.control import ControlBlock, Flag
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.nonfinite import overflowed_slots
from paceline.ddp.agree.peers import Decision
from paceline.ddp.agree.reports import FailureKind, FailureReport
from paceline.ddp.agree.weights import WeightedMean
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.publish import publish
from paceline.ddp.reduce.step import Step


class StepFinisher:
    """Finishes the steps of one group. Holds on to no bucket."""

    def __init__(self, context: ReduceContext, weighted_mean: WeightedMean | None = None) -> None:
        self._context = context
        self._peers = context.peers
        self._policy = context.policy
        self.weighted_mean = weighted_mean or WeightedMean()

    def factor(self, weight: float | None, divisor: Callable[[], float] | None) -> float:
        """What gradients are multiplied with ([Note: scaling] in gradient_access.py)."""
        if self._context.shards is not None:  # what it is divided by is known at the end
            return 1.0 if weight is None else weight
        if weight is not None:
            return self.weighted_mean.factor(weight)
        if self._context.has_hook:
            return 1.0
        return 1.0 / (divisor() if divisor else float(self._context.transport.world))

    def finish(
        self, step: Step, block: ControlBlock, buckets: Sequence[Bucket], drift: Drift
    ) -> bool:
        """Let the outside show the results. Return whether the step was left out.

        Raises:
            StepError: If the step failed on some rank; the same error on every rank.
        """
        decision = self._decide(block, step.failure, drift)
        if self._context.shards is not None:
            self._context.shards.scale(step, block, buckets)
        elif step.weight is not None:
            has_divided = self._context.has_hook
            multiplier = float(self._context.transport.world) if has_divided else 1.0
            self.weighted_mean.finish(buckets, block, multiplier=multiplier)
        is_skipped = decision is Decision.SKIP
        if not is_skipped and self._policy.nonfinite is not NonFinite.IGNORE:
            is_skipped = self._has_overflowed(step, buckets)
        if is_skipped:
            for bucket in buckets:
                bucket.scale(0.0)
        elif step.zeroed:
            _zero(step, buckets)
        publish(step, block, buckets)
        if self._context.shards is not None:
            self._context.shards.is_reduced = True
        return is_skipped

    def finish_joined(self, block: ControlBlock, drift: Drift) -> None:
        """The same for a rank that has joined: it has nothing to show."""
        self._decide(block, None, drift)
        if block.any(Flag.WEIGHTED):
            self.weighted_mean.finish([], block, multiplier=1.0)

    def _decide(self, block: ControlBlock, failure: FailureReport | None, drift: Drift) -> Decision:
        replicas = self._context.replicas
        return self._peers.decide(block, failure, self._policy, drift, replicas)

    def _has_overflowed(self, step: Step, buckets: Sequence[Bucket]) -> bool:
        """Gradients that are finite on every rank may have a sum that is not; all ranks see it."""
        # With shards any sum may overflow, on a number of ranks of which none has seen it.
        always = self._context.has_hook or self._context.shards is not None
        slots = overflowed_slots(buckets, always=always)
        if slots and self._policy.nonfinite is NonFinite.RAISE:
            step.fail(FailureKind.NONFINITE, slots, "finite on every rank, but their sum is not")
            assert step.failure is not None
            raise self._peers.error_for([step.failure], self._policy)
        return bool(slots)


def _zero(step: Step, buckets: Sequence[Bucket]) -> None:
    """Clear what another step, which was left out, has in common with this one."""
    for bucket in buckets:
        for slot in bucket.slots:
            if slot.index in step.zeroed:
                bucket.scale(0.0) if bucket.sparse else slot.zero()
