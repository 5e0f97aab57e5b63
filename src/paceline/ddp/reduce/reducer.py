"""The reducer: turns 'this gradient is ready' into 'these buckets are reduced'.

The wrapper constructs one and tells it about forwards (:meth:`Reducer.prepare_forward`,
:meth:`Reducer.arm`); autograd tells it about gradients (:meth:`Reducer.on_gradients`). It must not
know which transport it has, nor anything about modules, buffers or devices.

[Note: the life of a step]
    arm      a forward that will be synchronised has run; its outputs are tapped (taps.py)
    begin    its backward reaches an output, or a parameter: buckets get memory, and the end of the
             backward is hooked
    fill     gradients arrive and are brought into their slots, scaled: by their hooks (taps.py), or
             by the filler (filler.py). A bucket that is full is started once all before it have
             been: all ranks start in plan order (flight.py)
    finish   the backward is over: what is left is started, everything is waited for, and the
             control block is read ([Note: the control block] in control.py)
    judge    all ranks know the same about the step now: all of them raise, or none (peers.py;
             conclusion.py)
    settle   gradients that are not views of the buckets are given their values (homes.py)

[Note: late gradients]
The reducer is not told of gradients before the next bucket can be full, unless those that wait
outside of their buckets take much memory. For those of the last bucket, if it is small, it is not
told before the backward is over: one thread does all of it in one go (`Transport.start_last`).
Under distributed autograd nothing is won by bringing any gradient in early, for the context keeps
its own set anyway; and much may be lost, because what comes before the module is often remote,
and the engine sends for it only when the hooks have returned.

Nothing blocks between `begin` and `finish`, and nothing raises there either: a rank that stopped
in the middle would leave its peers waiting. Trouble is noted in the step (step.py) and judged at
the end, by everybody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence, Set
from operator import attrgetter
from typing import Any

import torch

from paceline.buckets import Bucket, BucketCaps, BucketPlan, ParameterSpec, Slot, plan_buckets
from paceline.config import MissingGradients, ReducePolicy
from paceline.ddp.agree.control import ControlBlock, Flag
from paceline.ddp.agree.diagnosis import autograd_grad_error
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.peers import Peers
from paceline.ddp.agree.reports import FailureKind, FailureReport
from paceline.ddp.autograd.hooks import GradientTaps, make_inbox, nodes_of, tap_nodes
from paceline.ddp.autograd.unused import Reach, first_reached, is_in_graph, reach_of
from paceline.ddp.reduce.arrivals import UNKNOWN_ARRIVALS, Arrivals
from paceline.ddp.reduce.attach_unused import attach_unreached
from paceline.ddp.reduce.bucket_set import BucketSet
from paceline.ddp.reduce.copy_in import BATCH_SLOTS, Filler
from paceline.ddp.reduce.finish import Conclusion
from paceline.ddp.reduce.gradient_access import ContextHome, GradientHome, LocalHome
from paceline.ddp.reduce.handover import Drain
from paceline.ddp.reduce.launch import Flight
from paceline.ddp.reduce.sharing import Sharing
from paceline.ddp.reduce.snapshot import summarize_buckets
from paceline.ddp.reduce.sparse import collect_sparse
from paceline.ddp.reduce.step import Step, conversion, converted
from paceline.ddp.reduce.step_state import Phase
from paceline.ddp.reduce.torch_names import ReducerNames
from paceline.ddp.reduce.usage import UsageMap
from paceline.errors import StepError
from paceline.forks import tell_children
from paceline.observe import DDPStats, StepClock
from paceline.torch_private import (
    current_context_id,
    enclosing_backward_node,
    is_inside_backward,
    is_inside_transform,
    never_compiled,
    queue_callback,
)
from paceline.types import Transport

_NOTHING = contextlib.nullcontext()
_requires_grad = attrgetter("requires_grad")
LATE_BYTES = 1 << 20
"""A last bucket up to this size is copied and reduced in less time than two threads need to
meet."""


class Reducer(ReducerNames):
    """Owns the buckets of one wrapper."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        policy: ReducePolicy,
        caps: BucketCaps,
        transport: Transport,
        peers: Peers,
    ) -> None:
        self.parameters = list(parameters)
        self.specs = tuple(specs)
        self.policy = policy
        self.caps = caps
        self.transport = transport
        self.peers = peers
        self.phase = Phase.IDLE
        self.clock = StepClock()
        self.usage = UsageMap(len(self.parameters))
        self.local_home: GradientHome = LocalHome(policy.views)
        self.weight: float | None = None
        self.join_divisor: Callable[[], float] | None = None
        self.drain = Drain()
        self.drift = Drift(self.parameters)
        self.after_step: Callable[[], None] = lambda: None
        self.on_error: Callable[[BaseException], None] = lambda _: None
        self.steps = self.skipped_steps = 0
        self.reduced_bytes = self.buckets_reduced = 0
        self.block: ControlBlock | None = None
        self.plan_is_agreed = False
        self.has_rebuilt = False
        self._step: Step | None = None
        self.arrivals = Arrivals(len(self.parameters))
        self._taps_are_suspect = False
        self._first_step = 0
        self._context_id: int | None = None
        self._conclusion = Conclusion(peers, transport.world)
        self._lock = threading.RLock()
        self._build(self._first_plan())
        self._inbox = make_inbox(self)
        self._tap()
        self.sharing = Sharing(self)
        tell_children(self)

    def let_go(self) -> None:
        """In a forked child: gradients are the child's own business from now on."""
        self._lock = threading.RLock()
        self.taps.remove()
        self._inbox.shut()
        self._inbox.clear()
        self.phase, self._step = Phase.IDLE, None
        self.peers.let_go()

    # --- buckets -------------------------------------------------------------------------------

    def _first_plan(self) -> BucketPlan:
        unknown = self.policy.static_graph or not self.policy.find_unused
        caps = self.caps.initial(order_unknown=unknown)
        return plan_buckets(self.specs, caps, by_arrival=False)

    def _build(self, plan: BucketPlan) -> None:
        """Make buckets for a plan."""
        self._set = BucketSet(plan, self.parameters, self.policy, self.transport.world)
        self.plan, self.buckets, self.slots = plan, self._set.buckets, self._set.slots
        self.filler = Filler(self.policy, self.usage, self.clock)
        before: Flight | None = getattr(self, "flight", None)
        patience = self.peers.patience()
        self.flight = Flight(
            self._set, self.transport, self.policy, self.usage, self.clock, patience
        )
        if before is not None:
            self.flight.take_over(before)

    def _agree_on_plan(self) -> None:
        """Cut buckets in the order of arrival, once it is known; see that all ranks agree.

        At the begin of a backward, not of a forward: a backward is a thing that all ranks do
        together, while a single rank may well run a forward alone, to evaluate.
        """
        follows_order = self.policy.static_graph or not self.policy.find_unused
        if follows_order and self.arrivals.is_order_known and not self.caps.listed:
            order = self.peers.agree_on_order(self.arrivals.take_order())
            specs = [self.specs[index] for index in order]
            self._build(plan_buckets(specs, self.caps.rebuilt(), by_arrival=True))
            self.plan_is_agreed = False
            self.has_rebuilt = True
        if not self.plan_is_agreed:
            self.peers.check_plan(self.plan)
            self.plan_is_agreed = True

    def change_policy(self, policy: ReducePolicy) -> None:
        """Follow another policy. Only before training."""
        self.policy = policy
        self._build(self._first_plan())

    def change_transport(self, transport: Transport, peers: Peers) -> None:
        """Go on with another group: buckets start over from the plan of construction."""
        self.transport, self.peers = transport, peers
        self._conclusion = Conclusion(peers, transport.world)
        self.phase, self._step = Phase.IDLE, None
        self.drift.forget()
        self._first_step = self.steps
        self.arrivals.forget()
        self.plan_is_agreed = self.has_rebuilt = False
        self._build(self._first_plan())

    def retap(self) -> None:
        """Listen at the parameters' present AccumulateGrad nodes."""
        self.taps.remove()
        self._tap()

    def _tap(self) -> None:
        large = {slot.index for slot in self.slots if not slot.small}
        self.taps = GradientTaps(self.parameters, self._inbox, large)
        self._nodes = frozenset(self.taps.nodes)

    # --- forward -------------------------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Deal with what a step that failed has left. Called before a forward that synchronises.

        Raises:
            StepError: With ``missing_gradients="wait"``, if gradients of the last step are missing.
        """
        self.drift.forwards += 1
        if self._taps_are_suspect:
            self._taps_are_suspect = False
            if not self.taps.are_intact(range(len(self.parameters))):
                self.retap()
        if self.phase in (Phase.REDUCING, Phase.WAITING) and not is_inside_backward():
            self._end_unfinished_step()

    def suspect_taps(self) -> None:
        """The module was changed: look before the next forward whether we still hear all of it."""
        self._taps_are_suspect = True

    def expect_backward(self) -> None:
        """Synchronise the next backward."""
        self._context_id = current_context_id()
        if self.phase is Phase.IDLE:
            self.phase = Phase.ARMED

    def arm(self, output: Any) -> Any:
        """Expect a backward through the output that is returned."""
        self._context_id = current_context_id()
        if self._context_id is not None and self.policy.tracks_unused:
            sparse = [spec.sparse for spec in self.specs]
            output = attach_unreached(output, self.parameters, self.taps.nodes, sparse)
        roots = nodes_of(output)
        reached = is_in_graph(roots, self._nodes)
        if roots and not reached:
            if is_inside_transform() or not any(map(_requires_grad, self.parameters)):
                # Its gradients are handed out (torch.func.grad); or all is frozen, as a GAN's
                # discriminator is while its generator learns.
                return output
            reached = self._is_heard_again(roots)
        if self.phase is Phase.IDLE:
            self.phase = Phase.ARMED
        tap_nodes(roots, self, leads_to_parameters=reached)
        return output

    def arm_if_reached(self, output: Any) -> Any:
        """Expect a backward if parameters hang on the output: a forward ran with lent tensors."""
        return self.arm(output) if is_in_graph(nodes_of(output), self._nodes) else output

    def _is_heard_again(self, roots: Set[Any]) -> bool:
        """Say whether parameters hang on an output to which we no longer listened.

        To convert a parameter makes autograd forget its hooks. A module is converted as a whole: we
        are deaf if the graph has none of our nodes, and then one parameter tells.
        """
        if self.taps.are_intact((0,)):
            return False
        self.retap()
        return is_in_graph(roots, self._nodes)

    def disarm(self) -> None:
        """A forward has run that is not synchronised: gradients that come next are local."""
        self.drift.on_local_forward()
        if self.phase is Phase.ARMED:
            self.phase = Phase.IDLE

    # --- backward: begin -----------------------------------------------------------------------

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output: the step begins, if it wants gradients of ours."""
        self.peers.check_process()
        with self._lock, _without_graph():
            if self.phase is Phase.REDUCING:
                return
            reach = first_reached(self.taps.nodes) if leads_to_parameters else Reach.RUNS
            if reach is Reach.UNREACHED:
                # torch.autograd.grad for inputs, as in a gradient penalty; or distributed autograd,
                # whose engine does not say: then the first gradient begins the step.
                return
            if reach is Reach.CAPTURED:
                error = autograd_grad_error(self.transport.rank)
                self.on_error(error)
                raise error
            self._begin(in_context=False)

    def on_gradients(self) -> None:
        """Gradients are ready ([Note: batches] in taps.py)."""
        with self._lock, _without_graph():
            while len(self._inbox) >= self._inbox.due:
                step = self._step
                if step is None or self.phase is not Phase.REDUCING:
                    if not self._begin_at_gradient():
                        return
                elif step.home.keeps_gradients and len(self._inbox) < self._set_due(step):
                    return  # a large gradient is in no hurry there
                else:
                    self._take(step, *self._inbox.take())

    def _begin_at_gradient(self) -> bool:
        """Begin with a gradient if a step is due; else it is local and stays where it is."""
        if self.phase is Phase.IDLE or self._is_others_gradient():
            if self.phase is Phase.IDLE:
                self.drift.on_local_gradient()
            for index in self._inbox.take()[0]:
                if self.policy.tracks_unused and self.parameters[index].grad is not None:
                    self.usage.flags[index] = 1
            return False
        # The engine of distributed autograd runs this node without admitting that it will.
        node = self.taps.nodes[self._inbox.first()]
        in_context = reach_of(node) is not Reach.RUNS
        self._begin(in_context=in_context, outer=None if in_context else enclosing_backward_node())
        return True

    def _is_others_gradient(self) -> bool:
        """Say whether a backward that did not reach our outputs is that of another wrapper."""
        if self.phase is not Phase.ARMED or not self.sharing:
            return False
        index = self._inbox.first()
        is_local = reach_of(self.taps.nodes[index]) is Reach.RUNS
        return is_local and self.sharing.is_others_business(index)

    def _take(self, step: Step, indices: Sequence[int], left: Sequence[int]) -> None:
        """Count gradients, bring in what is left, start buckets that are full. The hot path."""
        complete, unexpected = self.arrivals.count(indices)
        for index in unexpected:
            self._note_unexpected(step, self.slots[index])
        slots = [self.slots[index] for index in complete]
        left_slots = slots
        if len(left) < len(indices):
            is_left = set(left).__contains__
            left_slots = [slot for slot in slots if is_left(slot.index)] if left else []
        if self.filler.take(step, self.buckets, slots, left_slots):
            self._start_full(step)
        self._set_due(step)

    def _set_due(self, step: Step) -> int:
        """Ask to be told no later than the next bucket can be full; return for how many."""
        bucket = self.flight.next_bucket()
        if bucket is None:
            due = 1
        elif bucket is self.buckets[-1] and bucket.spec.nbytes <= LATE_BYTES:
            due = UNKNOWN_ARRIVALS  # [Note: late gradients]
        else:
            waits = step.home.keeps_gradients or step.is_brought_in
            due = bucket.pending if waits else min(BATCH_SLOTS, bucket.pending)
        self._inbox.due = due
        return due

    @never_compiled
    def _begin(self, *, in_context: bool, outer: Any = None) -> Step:
        """Open the buckets for a new step, or go on with one that waits for gradients.

        With a node of an ``outer`` backward, which runs this one inside of it, as reentrant
        checkpointing does: the step ends with that. What it leaves unused is seen at its end.
        """
        finish = self.sharing.watch(self._finish)
        if outer is None:
            queue_callback(finish)
        else:
            outer.register_hook(lambda *_: queue_callback(finish))
        if self.phase is Phase.WAITING and self._step is not None:
            self.phase = Phase.REDUCING
            if self.sharing:
                self.sharing.meet(self._step)
            self._set_due(self._step)
            return self._step
        in_context = in_context and self._context_id is not None
        home = ContextHome(self._context_id or 0) if in_context else self.local_home
        step = self._open_step(home)
        if self.arrivals.counts is not None:
            unused = [i for i, count in enumerate(self.arrivals.counts) if not count]
            self._take_absent(step, [self.slots[index] for index in unused])
        elif self.policy.searches_unused and not in_context and outer is None:
            self._take_absent(step, self._search_unused())
        self._set_due(step)
        return step

    def _open_step(self, home: GradientHome, *, joined: bool = False) -> Step:
        self._agree_on_plan()
        self.clock.start_backward(len(self.buckets))
        self.flight.open()
        self.drain.open()
        self.arrivals.open_step(static_graph=self.policy.static_graph)
        self._set.open(self.transport)
        factor = self._prefactor(self.weight)
        number = self.steps - self._first_step
        step = Step(number, self.transport.rank, home, self.weight, factor, joined=joined)
        if not joined:
            step.drift = self.drift.take()
        step.is_brought_in = self._open_inbox(step)
        self.phase, self._step = Phase.REDUCING, step
        if self.sharing and not joined:
            self.sharing.meet(step)
        return step

    def _open_inbox(self, step: Step) -> bool:
        """Let hooks bring gradients in as they come, if each comes once and becomes a view."""
        slots = self._set.plain_slots
        if slots is None or step.joined or not step.home.is_direct or step.factor == 0.0:
            return False
        if self.policy.batched_copy or self.arrivals.may_repeat:
            return False
        return self._inbox.open(slots, step.factor)

    def _prefactor(self, weight: float | None) -> float:
        """What gradients are multiplied with on their way in."""
        if weight is not None:
            return self._conclusion.weighted_mean.factor(weight)
        if self.flight.hook is not None:
            return 1.0
        divisor = self.join_divisor() if self.join_divisor else float(self.transport.world)
        return 1.0 / divisor

    def _search_unused(self) -> list[Slot]:
        """Ask the engine which parameters this backward will not reach."""
        with torch.profiler.record_function("search_unused_parameters"):
            nodes = self.taps.nodes
            return [s for s in self.slots if reach_of(nodes[s.index]) is Reach.UNREACHED]

    def _take_absent(self, step: Step, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.arrivals.expected[slot.index] = 0
            self._inbox.withhold(slot.index)
            self.filler.take_absent(step, self.buckets[slot.bucket_index], slot)
        self._start_full(step)

    def _start_full(self, step: Step) -> None:
        self.flight.start_full(step)
        self.drain.take_landed(step, self.flight, self.policy)

    # --- backward: finish ----------------------------------------------------------------------

    @never_compiled
    def _finish(self) -> None:
        """The backward is over. Runs as the engine's final callback."""
        self.peers.check_process()
        with self._lock, _without_graph():
            step = self._step
            if step is None or self.phase is not Phase.REDUCING:
                return
            self.clock.backward_ended = time.perf_counter_ns()
            self._inbox.shut()
            self._take(step, *self._inbox.take())
            if self.policy.static_graph and self.arrivals.counts is None:
                self._take_everything(step)
            missing = self._missing()
            if missing and not self.policy.find_unused:
                if self.policy.missing is MissingGradients.WAIT:
                    self.phase = Phase.WAITING
                    self._inbox.due = 1
                    return
                self._note_missing(step, missing)
            self._complete(step, missing)

    def _missing(self) -> list[Slot]:
        return [self.slots[index] for index in self.arrivals.missing()]

    def _take_everything(self, step: Step) -> None:
        """The first step of a static graph: how often gradients arrive is known only now."""
        arrived = self.arrivals.arrived
        self.arrivals.expected = list(arrived)
        for slot in self.slots:
            if not arrived[slot.index]:
                self.filler.take_absent(step, self.buckets[slot.bucket_index], slot)
        slots = [slot for slot in self.slots if arrived[slot.index]]
        self.filler.take(step, self.buckets, slots, slots)

    def _complete(self, step: Step, missing: Sequence[Slot]) -> None:
        """Start what is left, wait, judge, settle. Whatever happens, the next step can begin."""
        try:
            if step.is_cut_off and step.failure is not None:
                raise self.peers.error_for([step.failure], self.policy)
            self._take_absent(step, missing)
            self.block = self.flight.land(step)
            self._conclude(step, self.block)
        except StepError as error:
            self._taps_are_suspect = True
            self.on_error(error)
            raise
        finally:
            self._close()

    def _conclude(self, step: Step, block: ControlBlock) -> None:
        if step.shared:
            self.sharing.leave_to_others(step)
        is_skipped = self._conclusion.conclude(
            step, block, self.buckets, self.policy, self.drift, has_hook=self.has_hook
        )
        self.skipped_steps += is_skipped
        if is_skipped and step.left:
            self.sharing.skip()
        self.drain.take_rest(step, self.flight)
        self.arrivals.learn(static_graph=self.policy.static_graph)
        reduced = [bucket for bucket in self.buckets if not self.flight.is_skipped(bucket)]
        self.buckets_reduced = len(reduced)
        self.reduced_bytes += sum(bucket.spec.nbytes for bucket in reduced)

    def _close(self) -> None:
        """Leave nothing behind that could hold memory or disturb the next step."""
        for index in self._step.shared if self._step is not None else ():
            self.slots[index].is_shared = False
        self.phase, self._step = Phase.IDLE, None
        self.steps += 1
        self._inbox.shut()
        self._inbox.clear()
        self._inbox.due = 1
        self.clock.step_ended = time.perf_counter_ns()
        self.flight.close()
        self.drift.on_sync_end()
        self.join_divisor = None
        if self.policy.tracks_unused:
            self.usage.close_step()
        self.after_step()

    # --- other wrappers of the same parameters: [Note: shared parameters] in sharing.py -----------

    @property
    def step_in_flight(self) -> Step | None:
        """The step whose backward is running, if any."""
        return self._step if self.phase is Phase.REDUCING else None

    @property
    def group_ranks(self) -> tuple[int, ...]:
        """The ranks that reduce, in the numbers of the default group."""
        return self.peers.ranks

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook takes the place of the reduction."""
        return self.flight.hook is not None

    def keep_apart(self, step: Step, indices: Sequence[int]) -> None:
        """Leave gradients that have not arrived yet outside of the buckets until the step ends."""
        for index in indices:
            slot, arrived = self.slots[index], self.arrivals.arrived[index]
            if arrived or slot.is_shared:
                continue
            slot.is_shared = True
            step.shared.add(index)
            self._inbox.withhold(index)
            if slot.view is not None and slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()

    @property
    def is_armed(self) -> bool:
        """Whether a forward has run whose backward is to come."""
        return self.phase is Phase.ARMED

    def refuse(self, kind: FailureKind, detail: str) -> None:
        """Take part in the step that peers wait for, only to say on all ranks why it cannot be.

        Raises:
            StepError: On every rank.
        """
        with self._lock, _without_graph():
            step = self._open_step(self.local_home)
            step.fail(kind, [], detail)
            self._complete(step, self.slots)

    # --- joined ranks --------------------------------------------------------------------------

    def mirror_step(self) -> None:
        """Take part in a step of the peers with nothing to contribute: this rank has joined."""
        with self._lock, _without_graph():
            step = self._open_step(self.local_home, joined=True)
            try:
                for bucket in self.buckets:
                    self._empty(bucket)
                    self.flight.start(step, bucket)
                self.block = self.flight.land(step)
                self.peers.judge(self.block, None, self.policy, self.drift)
                if self.block.any(Flag.WEIGHTED):
                    self._conclusion.weighted_mean.finish([], self.block, multiplier=1.0)
                self.arrivals.learn()
            finally:
                self._close()

    def _empty(self, bucket: Bucket) -> None:
        if bucket.sparse:
            collect_sparse(bucket, None, 0.0)
        else:
            assert bucket.gradients is not None
            bucket.gradients.zero_()

    # --- what can be seen ----------------------------------------------------------------------

    def stats(self) -> DDPStats:
        """Return a snapshot of the counters and of the latest step's times."""
        clock = self.clock
        exposed_ns = max((end - clock.backward_ended for end in clock.ended), default=0)
        return DDPStats(
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            transport=self.transport.name,
            transport_reason=self.transport.reason,
            buckets=summarize_buckets(self.buckets, clock, self.block),
            backward_ms=clock.since_backward_ms(clock.backward_ended),
            exposed_ms=max(0.0, exposed_ns / 1e6),
            reduced_bytes=self.reduced_bytes,
        )

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the latest step; torch's tests ask for it."""
        used = self.block.used if self.block is not None else ()
        return torch.tensor(used, dtype=torch.int32, device=self.specs[0].device)

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters went unused in every step so far; also for torch's tests."""
        return self.usage.is_static

    # --- trouble -------------------------------------------------------------------------------

    def check_finished(self) -> None:
        """Raise if a backward has begun and its reductions are not complete."""
        if self.phase in (Phase.REDUCING, Phase.WAITING):
            raise self.peers.error_for([self._missing_report()], self.policy)

    def _missing_report(self) -> FailureReport:
        missing = self._missing()
        return FailureReport(
            FailureKind.MISSING,
            self.transport.rank,
            tuple(slot.spec.name for slot in missing),
            tuple(slot.index for slot in missing),
        )

    def _end_unfinished_step(self) -> None:
        """A backward began and did not end: complete its reductions, so that peers learn of it.

        Gradients may still be missing (``missing_gradients="wait"``), which is an error now. Or the
        backward raised here: then the peers are told, and this rank's user has seen it already.
        """
        step = self._step
        assert step is not None
        waits = self.policy.missing is MissingGradients.WAIT
        is_told = self.phase is Phase.REDUCING and not (waits and step.failure is not None)
        with self._lock, _without_graph():
            if is_told:
                step.fail(FailureKind.BACKWARD_RAISED, [], "its backward pass raised an exception")
            else:
                step.failure = self._missing_report()
            try:
                self._complete(step, self._missing())
            except StepError:
                if not is_told:
                    raise

    def _note_missing(self, step: Step, slots: Sequence[Slot]) -> None:
        """Say which gradients never came, and if that is because a parameter was converted."""
        if isinstance(self.local_home, LocalHome):
            changed = converted(slots)
            if changed:
                step.fail(FailureKind.GRADIENT_MISMATCH, changed, conversion(changed[0]))
        frozen = [slot.spec.name for slot in slots if not self.parameters[slot.index].requires_grad]
        detail = f"requires_grad is False there: {', '.join(frozen)}" if frozen else ""
        step.fail(FailureKind.MISSING, slots, detail)

    def _note_unexpected(self, step: Step, slot: Slot) -> None:
        is_static = self.arrivals.counts is not None
        kind = FailureKind.GRAPH_CHANGED if is_static else FailureKind.READY_TWICE
        arrived, expected = self.arrivals.arrived[slot.index], self.arrivals.expected[slot.index]
        detail = f"gradient number {arrived} in this backward, expected {expected}"
        step.fail(kind, [slot], detail)
        if self.policy.missing is MissingGradients.WAIT:
            assert step.failure is not None
            error = self.peers.error_for([step.failure], self.policy)
            self.on_error(error)
            raise error


def _without_graph() -> contextlib.AbstractContextManager[None]:
    """Nothing here is to be differentiated; in most backward passes that is so already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
