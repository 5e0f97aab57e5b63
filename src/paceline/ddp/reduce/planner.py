"""Which parameters share a bucket: decided once before the first step, and once more after it.

Called by :mod:`paceline.ddp.reduce.step_runner`. Must not know buckets, only plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.buckets import BucketCaps, BucketPlan, ParameterSpec, plan_buckets
from paceline.config import ReducePolicy
from paceline.ddp.agree.peers import Peers
from paceline.ddp.reduce.arrivals import Arrivals


class BucketPlanner:
    """Plans for some parameters.

    Attributes:
        plan: The present one.
        has_rebuilt: It follows the order in which gradients arrive.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], caps: BucketCaps, policy: ReducePolicy
    ) -> None:
        self.specs = tuple(specs)
        self.caps = caps
        self.has_rebuilt = False
        self._is_agreed = False
        self.plan = self.plan_unordered(policy)

    def plan_unordered(self, policy: ReducePolicy) -> BucketPlan:
        """Plan before the order of gradients is known."""
        caps = self.caps.initial(order_unknown=_follows_order(policy))
        self.plan = plan_buckets(self.specs, caps, by_arrival=False)
        return self.plan

    def plan_ordered(
        self, policy: ReducePolicy, arrivals: Arrivals, peers: Peers
    ) -> BucketPlan | None:
        """Plan by the order of arrival, as rank 0 has seen it; once, when it is known."""
        if not _follows_order(policy) or not arrivals.is_order_known or self.caps.listed:
            return None
        order = peers.agree_on_order(arrivals.take_order())
        specs = [self.specs[index] for index in order]
        self.plan = plan_buckets(specs, self.caps.rebuilt(), by_arrival=True)
        self._is_agreed = False
        self.has_rebuilt = True
        return self.plan

    def forget(self, policy: ReducePolicy) -> BucketPlan:
        """Start over, for another group."""
        self._is_agreed = self.has_rebuilt = False
        return self.plan_unordered(policy)

    def check_model(self, policy: ReducePolicy, peers: Peers) -> None:
        """Raise on every rank if some rank has another model: equal ones have equal plans."""
        peers.check_model(self.specs, policy, self.caps)
        self._is_agreed = True

    def check_plan(self, peers: Peers) -> None:
        """Raise on every rank if some rank has another plan; each plan is compared once."""
        if not self._is_agreed:
            peers.check_plan(self.plan)
            self._is_agreed = True


def _follows_order(policy: ReducePolicy) -> bool:
    return policy.static_graph or not policy.find_unused
