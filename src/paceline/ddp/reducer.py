"""The reducer: turns 'this gradient is ready' into 'these buckets are reduced'.

The wrapper constructs one, tells it about forwards (:meth:`Reducer.prepare_forward`,
:meth:`Reducer.arm`), and autograd tells it about gradients (:meth:`Reducer.on_gradient`). It must not
know which transport it has, nor anything about modules, buffers or devices.

[Note: the life of a step]
    arm        a forward that will be synchronised has run; its outputs are tapped
    begin      its backward reaches an output (or a parameter): buckets get memory, the end of the
               backward is hooked
    fill       gradients arrive; each is brought into its slot, scaled. A bucket that is full is
               started when all buckets before it have been, so that all ranks start in plan order
    finish     the backward is over: buckets that are left are started, all are waited for, the control
               block is read ([Note: the control block] in control.py)
    judge      what all ranks now know about the step: an error is raised by all of them or by none
    settle     gradients that are not views are given their values

Nothing blocks between `begin` and `finish`, and nothing raises there either: a rank that stopped
in the middle would leave its peers waiting. Trouble is noted (:meth:`Reducer._fail`) and judged at
the end, by everybody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import rpc

from paceline.buckets.bucket import SMALL_BYTES
from paceline.buckets.plan import UNLIMITED
from paceline.buckets import Bucket, BucketCaps, BucketPlan, ParameterSpec, Slot, plan_buckets
from paceline.config import GradientViews, MissingGradients, NonFinite, ReducePolicy
from paceline.ddp.comm_hook import RegisteredHook, hook_result
from paceline.ddp.control import ControlBlock, ControlLayout, ControlRow, Flag
from paceline.ddp.diagnosis import FailureKind, FailureReport, missing_error
from paceline.ddp.homes import ContextHome, GradientHome, LocalHome
from paceline.ddp.iteration import Phase
from paceline.ddp.logging_data import LoggingData
from paceline.ddp.nonfinite import bucket_is_finite, nonfinite_names
from paceline.ddp.peers import Peers, Verdict
from paceline.ddp.sparse import collect_sparse, start_sparse
from paceline.ddp.taps import GradientTaps, tap_outputs
from paceline.ddp.unused import Reach, find_tensors, first_reached, reach_of
from paceline.errors import AutogradGradError, CollectiveError, StepError
from paceline.observe import BucketStats, DDPStats, StepClock
from paceline.types import Reduction, Transport

BATCH_SLOTS = 64
"""Small gradients are brought in at the latest when so many wait: this bounds the extra memory."""

UNKNOWN_ARRIVALS = 1 << 30
"""Expected arrivals while a static graph is being learnt: more than ever come."""


class Reducer:
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
        self.clock = StepClock()
        self.hook: RegisteredHook | None = None
        self.home: GradientHome = LocalHome(policy.views)
        self.local_home: GradientHome = self.home
        self.after_bucket: Callable[[Bucket], None] | None = None
        self.on_error: Callable[[BaseException], None] = lambda _: None
        self.phase = Phase.IDLE
        self.steps = 0
        self.skipped_steps = 0
        self.reduced_bytes = 0
        self.buckets_reduced = 0
        self.graph_is_static = True
        self._previous_used: bytes | None = None
        self.weight: float | None = None
        self.block: ControlBlock | None = None
        self.sparse_rows: dict[str, torch.Tensor] = {}
        self.post_futures: list[torch.futures.Future[Any]] = []
        self.static_counts: list[int] | None = None
        self.used = bytearray(len(self.parameters))
        self.join_divisor: Callable[[], float] | None = None
        self.arrivals: list[int] | None = []
        self.plan_is_agreed = False
        self.has_rebuilt = False
        self.after_step: Callable[[], None] = lambda: None
        self._armed_context: int | None = None
        self._failure: FailureReport | None = None
        self._step_weight: float | None = None
        self._weight_unit = 1.0
        self._lock = threading.RLock()
        unknown = policy.static_graph or not policy.find_unused
        self._build(plan_buckets(self.specs, caps.initial(order_unknown=unknown), by_arrival=False))
        self.taps = GradientTaps(self.parameters, self)
        self._nodes = frozenset(self.taps.nodes)

    # --- buckets -------------------------------------------------------------------------------

    def _build(self, plan: BucketPlan) -> None:
        """Make buckets for a plan. Memory comes with the next backward, when the old is free."""
        self.plan = plan
        tracked = len(self.parameters) if self.policy.tracks_unused else 0
        self.layout = ControlLayout(self.transport.world, len(plan.buckets), tracked)
        last = len(plan.buckets) - 1
        small_bytes = UNLIMITED if self.policy.batched_copy else SMALL_BYTES
        self.buckets = [
            Bucket(
                i,
                spec,
                self.parameters,
                tail_numel=self.layout.numel if i == last else 0,
                small_bytes=small_bytes,
            )
            for i, spec in enumerate(plan.buckets)
        ]
        by_index = {slot.index: slot for bucket in self.buckets for slot in bucket.slots}
        self.slots = [by_index[index] for index in range(len(self.parameters))]
        self._lone_control: torch.Tensor | None = None
        self._next = 0

    def _agree_on_plan(self) -> None:
        """Cut buckets in the order of arrival, once it is known; see that all ranks agree.

        At the begin of a backward, not of a forward: a backward is a thing that all ranks do
        together, while a single rank may well run a forward alone, to evaluate.
        """
        if self.wants_rebuild():
            order = self.peers.agree_on_order(self.arrival_order())
            self.arrivals = None
            specs = [self.specs[index] for index in order]
            self._build(plan_buckets(specs, self.caps.rebuilt(), by_arrival=True))
            self.plan_is_agreed = False
            self.has_rebuilt = True
        if not self.plan_is_agreed:
            self.peers.check_plan(self.plan)
            self.plan_is_agreed = True

    def arrival_order(self) -> list[int]:
        """All parameters: those that arrived in the first step, then the others, last one first."""
        seen = dict.fromkeys(self.arrivals or ())
        rest = [i for i in reversed(range(len(self.parameters))) if i not in seen]
        return [*seen, *rest]

    def wants_rebuild(self) -> bool:
        """Whether a first step has shown the order, and it has not been used yet."""
        follows_order = self.policy.static_graph or not self.policy.find_unused
        return bool(follows_order and self.arrivals and not self.caps.listed)

    def change_policy(self, policy: ReducePolicy) -> None:
        """Follow another policy from the next step on."""
        self.policy = policy
        self.phase = Phase.IDLE
        self._build(self.plan)

    def retap(self) -> None:
        """Listen at the parameters' present AccumulateGrad nodes."""
        self.taps.remove()
        self.taps = GradientTaps(self.parameters, self)
        self._nodes = frozenset(self.taps.nodes)

    def change_transport(self, transport: Transport, peers: Peers) -> None:
        """Go on with another group: buckets start over from the plan of construction."""
        self.phase = Phase.IDLE
        self.transport, self.peers = transport, peers
        self.arrivals, self._failure = [], None
        self.static_counts = None
        self.plan_is_agreed = self.has_rebuilt = False
        unknown = self.policy.static_graph or not self.policy.find_unused
        caps = self.caps.initial(order_unknown=unknown)
        self._build(plan_buckets(self.specs, caps, by_arrival=False))

    def _attach_memory(self, bucket: Bucket) -> None:
        """Give a bucket memory, or new memory if somebody still holds the old."""
        if bucket.sparse:
            return
        if bucket.flat is not None:
            if self.policy.views is not GradientViews.SAFE or not bucket.is_held():
                return
            bucket.detach()
        spec = bucket.spec
        bucket.attach(self.transport.allocate(bucket.total_numel, spec.dtype, spec.device))

    # --- forward -------------------------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Deal with a backward that never ended. Called before a forward that synchronises.

        Raises:
            StepError: With ``missing_gradients="wait"``, if gradients of the last step are missing.
        """
        if self.phase not in (Phase.REDUCING, Phase.WAITING) or is_inside_backward():
            return
        if self.policy.missing is MissingGradients.WAIT:
            raise self._unfinished_error()
        self._abandon()

    def arm(self, output: Any) -> None:
        """Expect a backward through ``output``."""
        self._armed_context = _current_context()
        if self.phase is Phase.IDLE:
            self.phase = Phase.ARMED
        tap_outputs(find_tensors(output), self._nodes, self)

    # --- backward: begin -----------------------------------------------------------------------

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output: the step begins, unless it wants no gradient of ours."""
        with self._lock:
            if self.phase is Phase.REDUCING:
                return
            reach = first_reached(self.taps.nodes) if leads_to_parameters else Reach.RUNS
            if reach is Reach.UNREACHED:
                return  # torch.autograd.grad for inputs, as in a gradient penalty
            if reach is Reach.CAPTURED and self._armed_context is None:
                raise self._autograd_grad_error()
            self._begin(in_context=reach is Reach.CAPTURED)

    def on_gradient(self, index: int) -> None:
        """A parameter's gradient is ready. The hot path: runs once per parameter and step."""
        with self._lock:
            if self.phase is not Phase.REDUCING and not self._begin_at_gradient(index):
                return
            slot = self.slots[index]
            slot.arrived += 1
            if slot.arrived != slot.expected:
                if slot.arrived > slot.expected:
                    self._note_unexpected(slot)
                return
            if self.arrivals is not None:
                self.arrivals.append(index)
            bucket = slot.bucket
            bucket.pending -= 1
            if slot.small or bucket.sparse:
                bucket.waiting.append(slot)
                if bucket.pending == 0:
                    self._on_full(bucket)
                elif len(bucket.waiting) >= BATCH_SLOTS:
                    self._collect_waiting(bucket)
            else:
                self._collect_large(slot)
                if bucket.pending == 0:
                    self._on_full(bucket)

    def _begin_at_gradient(self, index: int) -> bool:
        """Begin with a gradient if a step is due; else it is local and stays where it is."""
        if self.phase is Phase.IDLE:
            if self.policy.tracks_unused and self.parameters[index].grad is not None:
                self.used[index] = 1
            return False
        in_context = reach_of(self.taps.nodes[index]) is Reach.CAPTURED
        self._begin(in_context=in_context)
        return True

    def _begin(self, *, in_context: bool) -> None:
        """Open the buckets for a new step, or go on with one that waits for gradients."""
        waiting = self.phase is Phase.WAITING
        self.phase = Phase.REDUCING
        Variable._execution_engine.queue_callback(self._finish)
        if waiting:
            return
        context = self._armed_context
        in_context = in_context and context is not None
        self.home = ContextHome(context) if in_context and context is not None else self.local_home
        self._agree_on_plan()
        self.clock.start_backward(len(self.buckets))
        self._open_buckets()
        if self.policy.find_unused or self.static_counts is not None:
            self._mark_unused()

    def _open_buckets(self) -> None:
        self._failure = None
        self._next = 0
        self._drained = 0
        self._unsettled: list[Slot] = []
        self._absent: list[Slot] = []
        self._stash: dict[int, torch.Tensor] = {}
        self._step_weight = self.weight
        self._factor = self._prefactor()
        self._control_reduction: Reduction | None = None
        learning = self.policy.static_graph and self.static_counts is None
        for bucket in self.buckets:
            self._attach_memory(bucket)
            bucket.pending = len(bucket.slots)
            bucket.waiting.clear()
            bucket.reduction = bucket.future = None
        for slot in self.slots:
            slot.arrived = 0
            slot.expected = UNKNOWN_ARRIVALS if learning else 1
        if self.static_counts is not None:
            for slot, count in zip(self.slots, self.static_counts, strict=True):
                slot.expected = count

    def _mark_unused(self) -> None:
        """Take the parameters as absent that this backward will not reach."""
        if self.static_counts is not None:
            absent = [slot for slot in self.slots if slot.expected == 0]
        else:
            with torch.profiler.record_function("paceline::search_unused_parameters"):
                absent = self._ask_engine()
        for slot in absent:
            self._take_absent(slot)
        self._start_full()

    def _ask_engine(self) -> list[Slot]:
        nodes = self.taps.nodes
        return [slot for slot in self.slots if reach_of(nodes[slot.index]) is Reach.UNREACHED]

    def _take_absent(self, slot: Slot) -> None:
        slot.expected = 0
        self._absent.append(slot)
        slot.bucket.pending -= 1
        if slot.bucket.pending == 0:
            self._fill(slot.bucket)

    # --- backward: fill ------------------------------------------------------------------------

    def _prefactor(self) -> float:
        """What gradients are multiplied with on their way in.

        [Note: weights] With ``weighted(n)`` the reduction sums n_r g_r and the control block brings
        all n_r, so the division by their sum comes last. ``_weight_unit`` is the power of two next to
        the mean weight of the previous weighted step, equal on all ranks: it keeps float16 in range
        and, being a power of two, changes no bit of the result.
        """
        if self._step_weight is not None:
            return self._step_weight / self._weight_unit
        if self.hook is not None:
            return 1.0
        divisor = self.join_divisor() if self.join_divisor else float(self.transport.world)
        return 1.0 / divisor

    def _collect_large(self, slot: Slot) -> None:
        with torch.no_grad():
            try:
                if self._factor == 0.0:
                    settled = self._collect_nothing([slot]) == []
                elif self._factor == 1.0:
                    settled = not self.home.collect([slot])
                else:
                    settled = self.home.collect_scaled(slot, self._factor)
            except (RuntimeError, TypeError) as error:
                self._fail(FailureKind.GRADIENT_MISMATCH, [slot], str(error))
                settled = True
        if not settled:
            self._unsettled.append(slot)
        if self.policy.tracks_unused:
            self._note_used([slot])

    def _collect_waiting(self, bucket: Bucket) -> None:
        slots, bucket.waiting = bucket.waiting, []
        if self.policy.tracks_unused:
            self._note_used(slots)
        with torch.no_grad():
            try:
                if bucket.sparse:
                    collect_sparse(bucket, self.home.gradient(slots[0]), self._factor)
                elif self._factor == 0.0:
                    self._unsettled += self._collect_nothing(slots)
                else:
                    self._unsettled += self.home.collect(slots)
            except (RuntimeError, TypeError) as error:
                self._fail(FailureKind.GRADIENT_MISMATCH, slots, str(error))

    def _collect_nothing(self, slots: Sequence[Slot]) -> list[Slot]:
        """A weight of zero: the gradient is not even read, for it may be NaN."""
        for slot in slots:
            assert slot.view is not None
            slot.view.zero_()
        return list(slots)

    def _note_used(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if self.home.gradient(slot) is not None:
                self.used[slot.index] = 1

    def _on_full(self, bucket: Bucket) -> None:
        self._fill(bucket)
        self._start_full()

    def _fill(self, bucket: Bucket) -> None:
        """All gradients of a bucket are there: bring in what waits, scale, check."""
        self.clock.ready[bucket.index] = time.perf_counter_ns()
        if bucket.waiting:
            self._collect_waiting(bucket)
        with torch.no_grad():
            if self._absent:
                self._collect_absent(bucket)
            if not bucket.sparse and self._factor not in (0.0, 1.0):
                bucket.scale_small(self._factor)
            if self.policy.nonfinite is not NonFinite.IGNORE and not bucket_is_finite(bucket):
                self._note_nonfinite(bucket)

    def _collect_absent(self, bucket: Bucket) -> None:
        """Bring in what an absent parameter still has from earlier: it is part of the mean."""
        slots = [slot for slot in self._absent if slot.bucket is bucket]
        for slot in slots:
            gradient = self.home.gradient(slot)
            if bucket.sparse:
                collect_sparse(bucket, gradient, self._factor)
                continue
            view = slot.view
            assert view is not None
            if gradient is view:
                self._stash[slot.index] = view.clone()
            elif gradient is not None:
                view.copy_(gradient)
            else:
                view.zero_()
            if self._factor == 0.0:
                view.zero_()
            elif not slot.small:
                view.mul_(self._factor)

    def _start_full(self) -> None:
        """Start every bucket whose turn it is and which is full."""
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            self._start(bucket)
        if self.after_bucket is not None and self._may_drain_early():
            self._drain()

    def _start(self, bucket: Bucket) -> None:
        is_last = bucket.index == len(self.buckets) - 1
        self.clock.began[bucket.index] = time.perf_counter_ns()
        if self._is_skipped(bucket):
            pass
        elif self.hook is not None:
            self._start_hook(bucket, is_last)
        else:
            if is_last and not bucket.sparse:
                assert bucket.tail is not None
                self._write_control(bucket.tail)
            self._reduce(bucket)
        if is_last and self.hook is None and (bucket.sparse or self._is_skipped(bucket)):
            self._start_lone_control()

    def _reduce(self, bucket: Bucket) -> None:
        try:
            if bucket.sparse:
                rows = self.sparse_rows.get(bucket.slots[0].spec.name)
                bucket.reduction = start_sparse(bucket, self.transport, rows)
            else:
                assert bucket.flat is not None
                bucket.reduction = self.transport.start(bucket.flat)
        except RuntimeError as error:
            raise self._collective_error(f"all_reduce of bucket {bucket.index}", error) from error
        bucket.reduction.on_done(self._end_stamp(bucket.index))

    def _start_hook(self, bucket: Bucket, is_last: bool) -> None:
        assert self.hook is not None
        try:
            bucket.future = self.hook.run(bucket, is_last=is_last)
        except Exception as error:
            self._fail(FailureKind.HOOK, bucket.slots, f"{type(error).__name__}: {error}")

    def _end_stamp(self, index: int) -> Callable[[], None]:
        ended = self.clock.ended

        def stamp() -> None:
            ended[index] = time.perf_counter_ns()

        return stamp

    def _is_skipped(self, bucket: Bucket) -> bool:
        """With ``skip_all_reduce_unused_params``: nothing in this bucket is used, on any rank."""
        return self.policy.skip_unused and all(slot.expected == 0 for slot in bucket.slots)

    # --- the control block ---------------------------------------------------------------------

    def _write_control(self, tail: torch.Tensor) -> None:
        flags = Flag.PRESENT
        if self._step_weight is not None:
            flags |= Flag.WEIGHTED
        if self._failure is not None:
            quiet = self._failure.kind is FailureKind.NONFINITE
            skip = quiet and self.policy.nonfinite is NonFinite.SKIP
            flags |= Flag.NONFINITE if skip else Flag.FAILED
        origin = self.clock.step_ended or self.clock.backward_began
        ready = tuple((stamp - origin) // 1000 for stamp in self.clock.ready)
        row = ControlRow(flags, self.steps, self._step_weight or 0.0, ready)
        used = self.used if self.policy.tracks_unused else ()
        self.layout.write(tail, self.transport.rank, row, used)

    def _start_lone_control(self, *, joined: bool = False) -> None:
        """Send the control block by itself, where no bucket can carry it."""
        if self._lone_control is None:
            device = self.specs[0].device
            self._lone_control = self.transport.allocate(self.layout.numel, torch.float32, device)
        if joined:
            self._lone_control.zero_()
        else:
            self._write_control(self._lone_control)
        self._control_reduction = self.transport.start(self._lone_control)

    def _read_control(self, *, joined: bool) -> ControlBlock:
        if self.hook is not None:
            # Only now: a hook may start further collectives from its callbacks, at any time.
            self._start_lone_control(joined=joined)
        if self._control_reduction is not None:
            self._control_reduction.wait()
            assert self._lone_control is not None
            return self.layout.read(self._lone_control)
        tail = self.buckets[-1].tail
        assert tail is not None
        return self.layout.read(tail)

    # --- backward: finish ----------------------------------------------------------------------

    def _finish(self) -> None:
        """The backward is over. Runs as the engine's final callback."""
        with self._lock, torch.no_grad():
            if self.phase is not Phase.REDUCING:
                return
            self.clock.backward_ended = time.perf_counter_ns()
            if self.policy.static_graph and self.static_counts is None:
                self._finish_learning()
            missing = [slot for slot in self.slots if slot.arrived < slot.expected]
            if missing and not self.policy.find_unused:
                if self.policy.missing is MissingGradients.WAIT:
                    self.phase = Phase.WAITING
                    return
                self._note_missing(missing)
            self._complete(missing)

    def _finish_learning(self) -> None:
        """The first step of a static graph: everything is started only now."""
        for slot in self.slots:
            slot.expected = slot.arrived
            if slot.arrived:
                slot.bucket.pending -= 1
                slot.bucket.waiting.append(slot)
            else:
                self._absent.append(slot)
                slot.bucket.pending -= 1
        if self.arrivals is not None and not self.arrivals:
            self.arrivals = [i for i in reversed(range(len(self.slots))) if self.slots[i].arrived]
        for bucket in self.buckets:
            large = [slot for slot in bucket.waiting if not (slot.small or bucket.sparse)]
            bucket.waiting = [slot for slot in bucket.waiting if slot.small or bucket.sparse]
            for slot in large:
                self._collect_large(slot)
            self._fill(bucket)
        self._start_full()

    def _complete(self, missing: Sequence[Slot]) -> None:
        """Start what is left, wait, judge, settle. Whatever happens, the next step can begin."""
        try:
            for slot in missing:
                self._take_absent(slot)
            self._start_full()
            block = self._wait_for_all()
            self._conclude(block)
        except StepError as error:
            self.on_error(error)
            raise
        finally:
            self._close()

    def _wait_for_all(self, *, joined: bool = False) -> ControlBlock:
        operation = ""
        try:
            for bucket in self.buckets:
                operation = f"all_reduce of bucket {bucket.index}"
                self._wait(bucket)
            operation = "exchange of control blocks"
            block = self._read_control(joined=joined)
            for future in self.post_futures:
                operation = "a future of the buffer hook"
                future.wait()
        except RuntimeError as error:
            if isinstance(error, StepError):
                raise
            raise self._collective_error(operation, error) from error
        self.block = block
        return block

    def _wait(self, bucket: Bucket) -> None:
        if bucket.future is None:
            bucket.wait()
            if not self.clock.ended[bucket.index]:
                self.clock.ended[bucket.index] = time.perf_counter_ns()
            return
        assert self.hook is not None
        try:
            bucket.future.wait()
            result = hook_result(bucket.future, bucket, self.hook.name)
        except Exception as error:
            self._fail(FailureKind.HOOK, bucket.slots, f"{type(error).__name__}: {error}")
            return
        finally:
            bucket.future = None
            self.clock.ended[bucket.index] = time.perf_counter_ns()
        if bucket.sparse:
            bucket.sparse_gradient = result
        elif bucket.gradients is not None and result.data_ptr() != bucket.gradients.data_ptr():
            bucket.gradients.copy_(result.reshape(-1))

    def _conclude(self, block: ControlBlock) -> None:
        verdict = self.peers.judge(block, self._failure, self.policy)
        self._divide_by_weights(block)
        if verdict is Verdict.SKIP:
            self._zero_all()
            self.skipped_steps += 1
        self._settle(block)
        for bucket in self.buckets[self._drained :]:
            self._run_after_bucket(bucket)
        if self.policy.static_graph and self.static_counts is None:
            self.static_counts = [slot.arrived for slot in self.slots]
        reduced = [bucket for bucket in self.buckets if not self._is_skipped(bucket)]
        self.buckets_reduced = len(reduced)
        self.reduced_bytes += sum(bucket.spec.nbytes for bucket in reduced)

    def _divide_by_weights(self, block: ControlBlock) -> None:
        """See [Note: weights]."""
        if self._step_weight is None:
            return
        weights = [row.weight for _, row in block.present()]
        total = sum(weights)
        if total <= 0.0:
            self._zero_all()
            return
        factor = self._weight_unit / total
        if self.hook is not None:
            factor *= self.transport.world
        for bucket in self.buckets:
            if bucket.sparse:
                assert bucket.sparse_gradient is not None
                bucket.sparse_gradient = bucket.sparse_gradient * factor
            elif bucket.gradients is not None:
                bucket.gradients.mul_(factor)
        self._weight_unit = _power_of_two(total / len(weights))

    def _zero_all(self) -> None:
        for bucket in self.buckets:
            if bucket.sparse and bucket.sparse_gradient is not None:
                bucket.sparse_gradient = bucket.sparse_gradient * 0
            elif bucket.gradients is not None:
                bucket.gradients.zero_()

    def _settle(self, block: ControlBlock) -> None:
        unsettled = self._unsettled[:]
        for slot in self._absent:
            if block.used and block.used[slot.index] == 0:
                self._restore(slot)
            else:
                unsettled.append(slot)
        if block.used:
            unsettled = [slot for slot in unsettled if block.used[slot.index] != 0]
        self.home.settle([slot for slot in unsettled if slot.view is not None])
        for bucket in self.buckets:
            if bucket.sparse and bucket.sparse_gradient is not None:
                slot = bucket.slots[0]
                if not block.used or block.used[slot.index] != 0:
                    self.home.settle_sparse(slot, bucket.sparse_gradient)
                bucket.sparse_gradient = None

    def _restore(self, slot: Slot) -> None:
        """No rank used this parameter: its gradient is left as it was, bit for bit."""
        before = self._stash.pop(slot.index, None)
        if before is not None and slot.view is not None:
            slot.view.copy_(before)

    def _close(self) -> None:
        """Leave nothing behind that could hold memory or disturb the next step."""
        self.phase = Phase.IDLE
        self.steps += 1
        self.clock.step_ended = time.perf_counter_ns()
        self.post_futures = []
        self._stash = {}
        self._unsettled, self._absent = [], []
        self._control_reduction = None
        self.join_divisor = None
        self._armed_context = None
        if self.policy.tracks_unused:
            self.graph_is_static &= self._previous_used in (None, bytes(self.used))
            self._previous_used = bytes(self.used)
            self.used = bytearray(len(self.parameters))
        for bucket in self.buckets:
            bucket.waiting.clear()
            bucket.reduction = bucket.future = None
        self.after_step()

    # --- what can be seen ----------------------------------------------------------------------

    def stats(self) -> DDPStats:
        """Return a snapshot of the counters and of the latest step's times."""
        clock, block = self.clock, self.block
        seen = bool(clock.ended) and len(clock.ended) == len(self.buckets)
        entries = []
        for bucket in self.buckets:
            names = tuple(slot.spec.name for slot in bucket.slots)
            entry = BucketStats(bucket.index, bucket.spec.nbytes, names)
            if seen and block is not None:
                entry = replace(
                    entry,
                    ready_ms=clock.since_backward_ms(clock.ready[bucket.index]),
                    began_ms=clock.since_backward_ms(clock.began[bucket.index]),
                    ended_ms=clock.since_backward_ms(clock.ended[bucket.index]),
                    exposed_ms=clock.exposed_ms(bucket.index),
                    last_rank=block.last_rank(bucket.index),
                )
            entries.append(entry)
        exposed = max((clock.ended[b.index] - clock.backward_ended for b in self.buckets), default=0) if seen else 0
        return DDPStats(
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            transport=self.transport.name,
            buckets=tuple(entries),
            backward_ms=clock.since_backward_ms(clock.backward_ended),
            exposed_ms=max(0, exposed) / 1e6,
            reduced_bytes=self.reduced_bytes,
        )

    def describe_to(self, logger: LoggingData) -> None:
        """Bring torch's logging data up to date."""
        if self.has_rebuilt:
            logger.set_plan(self.plan, rebuilt=True)
            order = ", ".join(str(index) for index in self.plan.order())
            logger.set("prev_iteration_grad_ready_order_indices", order)
        logger.set("num_buckets_reduced", self.buckets_reduced)
        logger.set("can_set_static_graph", int(self.graph_is_static))
        logger.set("unused_parameter_size", 0)

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the latest step; torch's tests ask for it."""
        used = self.block.used if self.block is not None else ()
        return torch.tensor(used, dtype=torch.int32, device=self.specs[0].device)

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters went unused in every step so far."""
        return self.graph_is_static

    # --- joined ranks --------------------------------------------------------------------------

    def mirror_step(self) -> None:
        """Take part in a step of the peers with nothing to contribute: this rank has joined."""
        with self._lock, torch.no_grad():
            self.home = self.local_home
            self._agree_on_plan()
            if self.arrivals == []:
                self.arrivals = [len(self.parameters) - 1]
            self.clock.start_backward(len(self.buckets))
            self._open_buckets()
            self.phase = Phase.REDUCING
            try:
                for bucket in self.buckets:
                    self._start_empty(bucket)
                block = self._wait_for_all(joined=True)
                self.peers.judge(block, None, self.policy)
            finally:
                self._close()

    def _start_empty(self, bucket: Bucket) -> None:
        is_last = bucket.index == len(self.buckets) - 1
        if bucket.sparse:
            collect_sparse(bucket, None, 0.0)
        else:
            assert bucket.flat is not None
            bucket.flat.zero_()
        if self.hook is not None:
            self._start_hook(bucket, is_last)
            return
        self._reduce(bucket)
        if is_last and bucket.sparse:
            self._start_lone_control(joined=True)

    # --- optimizer in backward -----------------------------------------------------------------

    def _may_drain_early(self) -> bool:
        """Whether a reduced bucket is final before the whole step has been judged."""
        return not (
            self.policy.tracks_unused
            or self._step_weight is not None
            or self.policy.nonfinite is not NonFinite.IGNORE
        )

    def _drain(self) -> None:
        """Hand over the buckets that are reduced already, in order."""
        while self._drained < self._next and self.buckets[self._drained].is_done():
            bucket = self.buckets[self._drained]
            self._drained += 1
            self._wait(bucket)
            mine = [slot for slot in self._unsettled if slot.bucket is bucket]
            self._unsettled = [slot for slot in self._unsettled if slot.bucket is not bucket]
            self.home.settle([slot for slot in mine if slot.view is not None])
            self._run_after_bucket(bucket)

    def _run_after_bucket(self, bucket: Bucket) -> None:
        if self.after_bucket is not None:
            self.after_bucket(bucket)

    # --- trouble -------------------------------------------------------------------------------

    def _fail(self, kind: FailureKind, slots: Sequence[Slot], detail: str = "") -> None:
        """Note a failure; the first one is the one that is told."""
        if self._failure is None:
            names = tuple(slot.spec.name for slot in slots)
            indices = tuple(slot.index for slot in slots)
            self._failure = FailureReport(kind, self.transport.rank, names, indices, detail)

    def _note_missing(self, slots: Sequence[Slot]) -> None:
        changed = [s for s in slots if s.parameter.dtype != s.spec.dtype and self._is_plain()]
        if changed:
            now = changed[0].parameter.dtype
            detail = f"was {changed[0].spec.dtype} when the module was wrapped, is {now} now"
            self._fail(FailureKind.GRADIENT_MISMATCH, changed, detail)
        self._fail(FailureKind.MISSING, slots)

    def _is_plain(self) -> bool:
        return type(self.local_home) is LocalHome

    def _note_unexpected(self, slot: Slot) -> None:
        static = self.static_counts is not None
        kind = FailureKind.GRAPH_CHANGED if static else FailureKind.READY_TWICE
        detail = f"gradient number {slot.arrived} in this backward, expected {slot.expected}"
        self._fail(kind, [slot], detail)
        if self.policy.missing is MissingGradients.WAIT:
            assert self._failure is not None
            error = self.peers.error_for([self._failure], self.policy)
            self.on_error(error)
            raise error

    def _note_nonfinite(self, bucket: Bucket) -> None:
        found = dict(nonfinite_names(bucket))
        slots = [slot for slot in bucket.slots if slot.spec.name in found]
        self._fail(FailureKind.NONFINITE, slots)

    def _unfinished_error(self) -> StepError:
        missing = [slot for slot in self.slots if slot.arrived < slot.expected]
        report = FailureReport(
            FailureKind.MISSING,
            self.transport.rank,
            tuple(slot.spec.name for slot in missing),
            tuple(slot.index for slot in missing),
        )
        self._close()
        error = missing_error(
            [report], self.transport.rank, self.policy.find_unused, self.policy.static_graph
        )
        self.on_error(error)
        return error

    def check_finished(self) -> None:
        """Raise if a backward has begun and its reductions are not complete."""
        if self.phase in (Phase.REDUCING, Phase.WAITING):
            raise self._unfinished_error()

    def _abandon(self) -> None:
        """The last backward raised here: complete its reductions, so that peers learn of it."""
        with torch.no_grad():
            for bucket in self.buckets[self._next :]:
                self._attach_memory(bucket)
                bucket.waiting.clear()
            self._fail(FailureKind.BACKWARD_RAISED, [], "its backward pass raised an exception")
            missing = [slot for slot in self.slots if slot.arrived < slot.expected]
            try:
                self._complete(missing)
            except StepError:
                pass  # this rank has already shown its user the exception that started it

    def _autograd_grad_error(self) -> AutogradGradError:
        error = AutogradGradError(
            f"Rank {self.transport.rank}: torch.autograd.grad was asked for gradients of parameters "
            "that DistributedDataParallel reduces. It hands them out before they can be reduced, so "
            "every rank would get its own. Call loss.backward() and read parameter.grad; or run the "
            "forward under `with ddp.no_sync():` (or through ddp.module) if local gradients are what "
            "you want.",
            rank=self.transport.rank,
        )
        self.on_error(error)
        return error

    def _collective_error(self, operation: str, cause: BaseException) -> CollectiveError:
        error = CollectiveError(
            f"Rank {self.transport.rank}: {operation} over {self.transport.name} failed in step "
            f"{self.steps}: {cause}\nA peer has probably died, or is in another collective. Look at "
            "the logs of the other ranks; the group cannot be used further.",
            rank=self.transport.rank,
            operation=operation,
        )
        self.on_error(error)
        return error


def is_inside_backward() -> bool:
    """Say whether this thread is running a backward pass."""
    return int(torch._C._current_graph_task_id()) != -1


def _current_context() -> int | None:
    """Return the id of the distributed autograd context that the caller is in."""
    if not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():
        return None
    try:
        return int(torch._C._distributed_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def _power_of_two(value: float) -> float:
    power = 1.0
    while power < value:
        power *= 2.0
    return power
