"""Runs the steps of a reducer: one begins with a backward, and ends when all ranks agree on it.

Autograd tells it about backward passes that reach an output (:meth:`StepRunner.on_output`) and
about gradients (:meth:`StepRunner.on_gradients`); forwards are the business of
:mod:`paceline.ddp.reduce.reducer`, which has the [Note: the life of a step]. What happens to
gradients in between: :mod:`paceline.ddp.reduce.progress`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.buckets import BucketPlan, Slot
from paceline.config import MissingGradients, ReducePolicy
from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.agree.diagnosis import autograd_grad_error
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.peers import Peers
from paceline.ddp.agree.reports import FailureKind, FailureReport
from paceline.ddp.agree.weights import WeightedMean
from paceline.ddp.autograd.hooks import GradientHooks, make_ready_queue
from paceline.ddp.autograd.unused import Reach, first_reached, reach_of
from paceline.ddp.reduce.arrivals import Arrivals
from paceline.ddp.reduce.bucket_set import BucketSet
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.finish import StepFinisher
from paceline.ddp.reduce.gradient_access import ContextAccess, GradientAccess
from paceline.ddp.reduce.handover import Handover, StepEnds
from paceline.ddp.reduce.manual_finish import ManualFinish
from paceline.ddp.reduce.planner import BucketPlanner
from paceline.ddp.reduce.progress import StepProgress
from paceline.ddp.reduce.sharing import Sharing
from paceline.ddp.reduce.snapshot import Counters
from paceline.ddp.reduce.step import Step, report_failure
from paceline.ddp.reduce.step_state import StepPhase, without_graph
from paceline.errors import StepError
from paceline.forks import tell_children
from paceline.observe.step_clock import StepOutcome
from paceline.torch_private.autograd import enclosing_backward_node, queue_callback
from paceline.torch_private.compile import never_compiled
from paceline.types import Transport


class StepRunner(ManualFinish):
    """The steps of one reducer.

    Attributes:
        phase: Where it stands.
        weight: Of the next step, inside of ``weighted(n)``.
        divisor: What the next step is divided by, if not by the number of ranks (``join``).
        context_id: Of the distributed autograd context of the latest forward.
        block: The control block of the latest step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        planner: BucketPlanner,
        context: ReduceContext,
        access: GradientAccess,
        ends: StepEnds,
    ) -> None:
        self.parameters = list(parameters)
        self.planner = planner
        self.context = context
        self.phase = StepPhase.IDLE
        self.weight: float | None = None
        self.divisor: Callable[[], float] | None = None
        self.context_id: int | None = None
        self.block: ControlBlock | None = None
        self.counters = Counters()
        self.drift = Drift(self.parameters)
        self._access = access
        self._after_step = ends.after_step
        self._handover = Handover(ends.consumer)
        self._arrivals = Arrivals(len(self.parameters))
        self._finisher = StepFinisher(context)
        self._step: Step | None = None
        self._first_step = 0
        self._lock = threading.RLock()
        self.queue = make_ready_queue(self)
        self._build(planner.plan)
        large = {slot.index for slot in self.progress.slots if not slot.small}
        self.hooks = GradientHooks(self.parameters, self.queue, large)
        self.sharing = Sharing(self)
        tell_children(self)

    def let_go(self) -> None:
        """In a forked child: gradients are the child's own business from now on."""
        self._lock = threading.RLock()
        self.hooks.remove()
        self.queue.stop_copying()
        self.queue.clear()
        self.phase, self._step = StepPhase.IDLE, None
        self.context.peers.let_go()

    @property
    def step_in_flight(self) -> Step | None:
        """The step whose backward is running, if any."""
        return self._step if self.phase is StepPhase.REDUCING else None

    @property
    def weighted_mean(self) -> WeightedMean:
        """What remembers the scale of weights from step to step."""
        return self._finisher.weighted_mean

    @property
    def next_step(self) -> int:
        """The number that the step has which is under way, or comes next."""
        return self.counters.steps - self._first_step

    # --- plans and groups ----------------------------------------------------------------------

    def _build(self, plan: BucketPlan) -> None:
        """Make buckets for a plan."""
        context = self.context
        bucket_set = BucketSet(plan, self.parameters, context.policy, context.transport.world)
        context.clock.plan = plan
        self.progress = StepProgress(
            context, bucket_set, self._arrivals, self.queue, self._handover
        )

    def change_policy(self, policy: ReducePolicy) -> None:
        """Follow another policy. Only before training."""
        self._change(replace(self.context, policy=policy))
        self._build(self.planner.plan_unordered(policy))

    def change_group(self, transport: Transport, peers: Peers) -> None:
        """Go on with another group: buckets start over from the plan of construction."""
        self._change(replace(self.context, transport=transport, peers=peers))
        # A backward may have raised in the middle: what it has brought belongs to no step.
        self.queue.stop_copying()
        self.queue.clear()
        self.queue.due = 1
        self.phase, self._step = StepPhase.IDLE, None
        self.drift.forget()
        self._first_step = self.counters.steps
        self._arrivals.forget()
        self._build(self.planner.forget(self.context.policy))

    def _change(self, context: ReduceContext) -> None:
        self.context = context
        # The scale of weights stays: float16 gradients could overflow without it.
        self._finisher = StepFinisher(context, self._finisher.weighted_mean)

    def _agree_on_plan(self) -> None:
        """Cut buckets in the order of arrival, once it is known; see that all ranks agree.

        At the beginning of a backward, not of a forward: a backward is a thing that all ranks do
        together, while a single rank may well run a forward alone, to evaluate.
        """
        context = self.context
        plan = self.planner.plan_ordered(context.policy, self._arrivals, context.peers)
        if plan is not None:
            self._build(plan)
        self.planner.check_plan(context.peers)

    # --- begin ---------------------------------------------------------------------------------

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output: the step begins, if it wants gradients of ours."""
        self.context.peers.check_process()
        with self._lock, without_graph():
            if self.phase is StepPhase.REDUCING:
                return
            self.check_finalized()
            reach = first_reached(self.hooks.nodes) if leads_to_parameters else Reach.RUNS
            if reach is Reach.UNREACHED:
                # torch.autograd.grad for inputs, as in a gradient penalty; or distributed autograd,
                # whose engine does not say: then the first gradient begins the step.
                return
            if reach is Reach.CAPTURED:
                error = autograd_grad_error(self.context.transport.rank)
                self.context.on_error(error)
                raise error
            if self.context.shards is not None:
                self.context.shards.check_backward()
            self._begin(in_context=False)

    def on_gradients(self) -> None:
        """Gradients are ready ([Note: batches] in autograd/hooks.py)."""
        queue = self.queue
        with self._lock, without_graph():
            while len(queue) >= queue.due:
                step = self._step
                if step is None or self.phase is not StepPhase.REDUCING:
                    if not self._begin_at_gradient():
                        return
                elif step.access.keeps_gradients and len(queue) < self.progress.set_due(step):
                    return  # a large gradient is in no hurry there
                else:
                    self.progress.take(step, *queue.take())

    def _begin_at_gradient(self) -> bool:
        """Begin with a gradient if a step is due; else it is local and stays where it is."""
        self.check_finalized()
        if self.phase is StepPhase.IDLE or self._is_others_gradient():
            if self.phase is StepPhase.IDLE:
                self.drift.on_local_gradient()
            self.progress.count_local()
            return False
        # The engine of distributed autograd runs this node without admitting that it will.
        node = self.hooks.nodes[self.queue.first()]
        in_context = reach_of(node) is not Reach.RUNS
        self._begin(in_context=in_context, outer=None if in_context else enclosing_backward_node())
        return True

    def _is_others_gradient(self) -> bool:
        """Say whether a backward that did not reach our outputs is that of another wrapper."""
        if self.phase is not StepPhase.EXPECTING or not self.sharing:
            return False
        index = self.queue.first()
        is_local = reach_of(self.hooks.nodes[index]) is Reach.RUNS
        return is_local and self.sharing.is_others_business(index)

    @never_compiled
    def _begin(self, *, in_context: bool, outer: Any = None) -> None:
        """Open the buckets for a new step, or go on with one that waits for gradients.

        With a node of an ``outer`` backward, which runs this one inside of it, as reentrant
        checkpointing does: the step ends with that. What it leaves unused is seen at its end.
        """
        finish = self.sharing.watch(self._finish)
        if outer is None:
            queue_callback(finish)
        else:
            outer.register_hook(lambda *_: queue_callback(finish))
        if self.phase is StepPhase.WAITING and self._step is not None:
            step = self._step
            self.phase = StepPhase.REDUCING
            if self.sharing:
                self.sharing.meet(step)
        else:
            in_context = in_context and self.context_id is not None
            step = self._open(ContextAccess(self.context_id or 0) if in_context else self._access)
            if self._arrivals.counts is not None:
                self.progress.take_absent(step, self.progress.unused_in_static_graph())
            elif self.context.policy.searches_unused and not in_context and outer is None:
                self.progress.take_absent(step, _unreached(self.hooks, self.progress.slots))
        self.progress.set_due(step)

    def _open(self, access: GradientAccess, *, joined: bool = False) -> Step:
        self._agree_on_plan()
        self.progress.open(is_joined=joined)
        factor = self._finisher.factor(self.weight, self.divisor)
        number = self.next_step
        rank = self.context.transport.rank
        step = Step(number, rank, access, self.weight, factor, joined=joined)
        if not joined:
            step.drift = self.drift.take()
            if self.context.replicas is not None:
                step.digest = self.context.replicas.digest(number)
        self.progress.start_copying(step)
        self.phase, self._step = StepPhase.REDUCING, step
        if self.sharing and not joined:
            self.sharing.meet(step)
        return step

    # --- end -----------------------------------------------------------------------------------

    @never_compiled
    def _finish(self) -> None:
        """The backward is over. Runs as the engine's final callback."""
        self.context.peers.check_process()
        with self._lock, without_graph():
            step, policy, progress = self._step, self.context.policy, self.progress
            if step is None or self.phase is not StepPhase.REDUCING:
                return
            self.context.clock.end_backward()
            self.queue.stop_copying()
            progress.take(step, *self.queue.take())
            if policy.static_graph and self._arrivals.counts is None:
                progress.take_static(step)
            missing = progress.missing()
            if missing and not policy.find_unused:
                if policy.missing is MissingGradients.WAIT:
                    self.phase = StepPhase.WAITING
                    self.queue.due = 1
                    return
                step.fail_missing(missing, may_be_converted=not self._access.exchanges_data)
            if self.is_manual:
                self._hold(step, missing)
            else:
                self._complete(step, missing)

    def _complete(self, step: Step, missing: Sequence[Slot]) -> None:
        """Launch what is left, wait, decide, publish. Whatever happens, the next step can begin."""
        try:
            if step.is_cut_off and step.failure is not None:
                raise self.context.peers.error_for([step.failure], self.context.policy)
            self.progress.take_absent(step, missing)
            self.block = self.progress.launcher.wait_all(step)
            self._conclude(step, self.block)
        except StepError as error:
            self.hooks.suspect()
            self.context.on_error(error)
            raise
        finally:
            self._close()

    def _conclude(self, step: Step, block: ControlBlock) -> None:
        buckets, launcher = self.progress.buckets, self.progress.launcher
        if step.shared:
            self.sharing.leave_to_others(step)
        is_skipped = self._finisher.finish(step, block, buckets, self.drift)
        self.counters.skipped_steps += is_skipped
        outcome = StepOutcome.SKIPPED if is_skipped else StepOutcome.REDUCED
        self.context.clock.outcome = outcome
        if is_skipped and step.left:
            self.sharing.skip()
        self._handover.take_rest(step, launcher)
        self._arrivals.learn(static_graph=self.context.policy.static_graph)
        self.counters.count_reduced([b for b in buckets if not launcher.is_skipped(b)])
        self.progress.release()

    def _close(self) -> None:
        self.progress.close(self._step)
        self.phase, self._step = StepPhase.IDLE, None
        self.counters.steps += 1
        block = self.block
        self.context.clock.end_step(self.counters.steps, block.last_rank if block else None)
        self.drift.on_sync_end()
        self.divisor = None
        if self.context.policy.tracks_unused:
            self.context.usage.close_step()
        if self._after_step is not None:
            self._after_step()

    # --- steps without a backward of their own -------------------------------------------------

    def mirror_step(self) -> None:
        """Take part in a step of the peers with nothing to contribute: this rank has joined."""
        with self._lock, without_graph():
            step = self._open(self._access, joined=True)
            try:
                self.progress.launch_empty(step)
                self.block = self.progress.launcher.wait_all(step)
                self._finisher.finish_joined(self.block, self.drift)
                self.context.clock.outcome = StepOutcome.JOINED
                self._arrivals.learn()
                self.progress.release()
            finally:
                self._close()

    def refuse(self, kind: FailureKind, detail: str) -> None:
        """Take part in the step that peers wait for, only to say on all ranks why it cannot be.

        Raises:
            StepError: On every rank.
        """
        with self._lock, without_graph():
            step = self._open(self._access)
            step.fail(kind, [], detail)
            self._complete(step, self.progress.slots)

    def end_unfinished(self) -> None:
        """Complete the reductions of a backward that did not end, so that peers learn of it.

        Gradients may still be missing (``missing_gradients="wait"``), which is an error now. Or the
        backward raised here: then the peers are told, and this rank's user has seen it already.
        """
        step = self._step
        if step is None:
            return
        waits = self.context.policy.missing is MissingGradients.WAIT
        is_told = self.phase is StepPhase.REDUCING and not (waits and step.failure is not None)
        with self._lock, without_graph():
            if is_told:
                step.fail(FailureKind.BACKWARD_RAISED, [], "its backward pass raised an exception")
            else:
                step.failure = self._missing_report()
            try:
                self._complete(step, self.progress.missing())
            except StepError:
                if not is_told:
                    raise

    def check_finished(self) -> None:
        """Raise if a backward has begun and its reductions are not complete."""
        self.check_finalized()
        if self._step is not None:
            raise self.context.peers.error_for([self._missing_report()], self.context.policy)

    def _missing_report(self) -> FailureReport:
        missing = self.progress.missing()
        return report_failure(FailureKind.MISSING, self.context.transport.rank, missing)


def _unreached(hooks: GradientHooks, slots: Sequence[Slot]) -> list[Slot]:
    """Ask the engine which parameters this backward will not reach."""
    with torch.profiler.record_function("search_unused_parameters"):
        return [slot for slot in slots if reach_of(hooks.nodes[slot.index]) is Reach.UNREACHED]
