"""The reducer: averages the gradients of the backward that follows a forward.

The wrapper constructs one and tells it about forwards (:meth:`Reducer.prepare_forward`,
:meth:`Reducer.expect_backward_of`); the rest is autograd's calls
(:mod:`paceline.ddp.reduce.step_runner`). It must not know which transport it has, nor anything
about modules, buffers or devices.

[Note: the life of a step]
    expect   a forward that will be synchronised has run; its outputs have hooks (autograd/hooks.py)
    begin    its backward reaches an output, or a parameter: buckets get memory, and the end of the
             backward has a callback (step_runner.py)
    fill     gradients arrive and are copied into their slots, scaled: by their hooks, or by the
             copier (copy_in.py). A bucket that is full is launched once all before it have been:
             all ranks launch in plan order (progress.py, launch.py)
    finish   the backward is over: what is left is launched, everything is waited for, and the
             control block is read ([Note: the control block] in agree/control.py)
    decide   all ranks know the same about the step now: all of them raise, or none (agree/peers.py;
             finish.py)
    publish  gradients that are not views of the buckets are given their values (publish.py)

[Note: late gradients]
The runner is not told of gradients before the next bucket can be full, unless those that wait
outside of their buckets take much memory. For those of the last bucket, if it is small, it is not
told before the backward is over: one thread does all of it in one go (`Transport.start_last`). The
transport says how small (`Transport.late_bytes`).
Under distributed autograd nothing is won by copying any gradient early, for the context keeps
its own set anyway; and much may be lost, because what comes before the module is often remote,
and the engine sends for it only when the hooks have returned.

Nothing blocks between `begin` and `finish`, and nothing raises there either: a rank that stopped
in the middle would leave its peers waiting. Trouble is noted in the step (step.py) and decided
upon at the end, by everybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from paceline.buckets import Bucket, BucketCaps, BucketPlan, ParameterSpec
from paceline.config import ReducePolicy
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.no_sync_guard import Switched
from paceline.ddp.agree.peers import Peers
from paceline.ddp.agree.replicas import ReplicaCheck
from paceline.ddp.autograd.hooks import hook_outputs, output_nodes
from paceline.ddp.reduce.arrivals import UsageMap
from paceline.ddp.reduce.attach_unused import attach_unreached
from paceline.ddp.reduce.context import ReduceContext, Registrations
from paceline.ddp.reduce.gradient_access import GradientAccess, LocalAccess
from paceline.ddp.reduce.handover import StepEnds
from paceline.ddp.reduce.planner import BucketPlanner
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.ddp.reduce.snapshot import take_snapshot
from paceline.ddp.reduce.step_runner import StepRunner
from paceline.ddp.reduce.step_state import StepPhase
from paceline.ddp.reduce.torch_names import ReducerNames
from paceline.observe import DDPStats, StepClock
from paceline.torch_private.autograd import (
    current_context_id,
    is_inside_backward,
    is_inside_transform,
)
from paceline.types import Transport

_requires_grad = attrgetter("requires_grad")


class Reducer(ReducerNames):
    """Reduces the gradients of one wrapper.

    Args:
        parameters: Whose gradients are reduced.
        specs: What buckets have to know of each.
        policy: How gradients are treated.
        caps: How large buckets may be.
        transport: What they travel over.
        peers: The other ranks.
        access: How gradients are reached; in ``parameter.grad`` unless something else is said.
        ends: Who is told of a step's end.
        on_error: Told of errors before they are raised.
        replicas: Compares what ranks hold, if that is asked for.
        shards: Where the gradients of a rank's shards are added up, if it runs shards.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        policy: ReducePolicy,
        caps: BucketCaps,
        transport: Transport,
        peers: Peers,
        *,
        access: GradientAccess | None = None,
        ends: StepEnds | None = None,
        on_error: Callable[[BaseException], None] = lambda _: None,
        replicas: ReplicaCheck | None = None,
        shards: ShardSums | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.registered = Registrations()
        self.clock = StepClock()
        self.usage = UsageMap(len(parameters))
        self.runner = StepRunner(
            parameters,
            BucketPlanner(specs, caps, policy),
            ReduceContext(
                policy,
                transport,
                peers,
                self.usage,
                self.clock,
                self.registered,
                on_error,
                replicas,
                shards,
            ),
            access or LocalAccess(policy.views),
            ends or StepEnds(),
        )
        self.parameters = self.runner.parameters
        self.planner = self.runner.planner
        self.counters = self.runner.counters
        self.sharing = self.runner.sharing
        self.hooks = self.runner.hooks

    @property
    def drift(self) -> Drift:
        """What this rank did, as ranks compare it."""
        return self.runner.drift

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they start."""
        return self.runner.progress.buckets

    @property
    def plan(self) -> BucketPlan:
        """How parameters are cut into buckets."""
        return self.planner.plan

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.runner.context.transport.rank

    def check_model(self) -> None:
        """Raise ModelMismatchError on every rank if some rank has another model. Collective."""
        context = self.runner.context
        self.planner.check_model(context.policy, context.peers)

    # --- forward -------------------------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Deal with what a step that failed has left. Called before a forward that synchronises.

        Raises:
            StepError: With ``missing_gradients="wait"``, if gradients of the last step are missing.
            FinalizationError: If the program has to end the last step, and has not.
        """
        self.runner.check_finalized()
        self.drift.forwards += 1
        self.hooks.check_suspects()
        if (
            self.runner.phase in (StepPhase.REDUCING, StepPhase.WAITING)
            and not is_inside_backward()
        ):
            self.runner.end_unfinished()

    def expect_backward(self) -> None:
        """Synchronise the next backward."""
        self.runner.context_id = current_context_id()
        if self.runner.phase is StepPhase.IDLE:
            self.runner.phase = StepPhase.EXPECTING

    def expect_backward_of(self, output: Any) -> Any:
        """Expect a backward through the output that is returned."""
        runner = self.runner
        runner.context_id = current_context_id()
        if runner.context_id is not None and runner.context.policy.tracks_unused:
            sparse = [spec.sparse for spec in self.specs]
            output = attach_unreached(output, self.parameters, self.hooks.nodes, sparse)
        roots = output_nodes(output)
        reached = self.hooks.are_below(roots)
        if roots and not reached:
            if is_inside_transform() or not any(map(_requires_grad, self.parameters)):
                # Its gradients are handed out (torch.func.grad); or all is frozen, as a GAN's
                # discriminator is while its generator learns.
                return output
            reached = self.hooks.attach_below(roots)
        if runner.phase is StepPhase.IDLE:
            runner.phase = StepPhase.EXPECTING
        hook_outputs(roots, runner, leads_to_parameters=reached)
        return output

    def expect_if_reached(self, output: Any) -> Any:
        """Expect a backward if parameters hang on the output: a forward ran with lent tensors."""
        reached = self.hooks.are_below(output_nodes(output))
        return self.expect_backward_of(output) if reached else output

    def expect_local_gradients(self, wrapper: Switched) -> None:
        """A forward has run that is not synchronised: gradients that come next are local."""
        self.drift.on_local_forward()
        self.drift.no_sync.note_forward(wrapper, self.rank, self.runner.context.transport.world)
        if self.expects_backward:
            self.runner.phase = StepPhase.IDLE

    def end_shard(self) -> None:
        """A shard whose gradients are local has ended, well or not."""
        if self.runner.phase in (StepPhase.IDLE, StepPhase.EXPECTING):
            self.runner.progress.count_local(is_over=True)

    @property
    def expects_backward(self) -> bool:
        """Whether a forward has run whose backward is to come."""
        return self.runner.phase is StepPhase.EXPECTING

    # --- the next step -------------------------------------------------------------------------

    def look_at_replica(self, *, with_buffers: bool) -> None:
        """Before a forward that synchronises: see what this rank holds, if ranks compare it."""
        replicas, step = self.runner.context.replicas, self.runner.next_step
        if replicas is not None and replicas.is_due(step):
            replicas.look(step, with_buffers=with_buffers)

    @contextlib.contextmanager
    def weighted(self, weight: float | None) -> Iterator[None]:
        """Let steps that begin in this context count with a weight."""
        before, self.runner.weight = self.runner.weight, weight
        try:
            yield
        finally:
            self.runner.weight = before

    def divide_next_step_by(self, divisor: Callable[[], float]) -> None:
        """Ask ``divisor`` for what the next step is divided by, instead of the number of ranks."""
        self.runner.divisor = divisor

    def stats(self) -> DDPStats:
        """Return a snapshot of the counters and of the latest step's times."""
        runner = self.runner
        return take_snapshot(
            self.counters, runner.context.transport, self.buckets, self.clock, runner.block
        )
