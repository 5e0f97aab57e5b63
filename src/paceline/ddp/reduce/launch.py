"""Launches the reductions of a step in plan order, waits for them, and reads the control block.

Between :meth:`BucketLauncher.launch` and :meth:`BucketLauncher.wait_all` nothing blocks. Knows the
transport and the hook; must not know how buckets are filled or what becomes of the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.buckets import Bucket
from paceline.config import NonFinite
from paceline.ddp.agree.control import ControlBlock, ControlRow, Flag
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.reduce.bucket_set import BucketSet
from paceline.ddp.reduce.comm_hook import RegisteredHook, check_future, hook_result
from paceline.ddp.reduce.context import ReduceContext
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.ddp.reduce.sparse import start_sparse
from paceline.ddp.reduce.step import Step
from paceline.errors import CollectiveError, PeerLostError
from paceline.types import Reduction

_PRESENT: int = Flag.PRESENT.value


class BucketLauncher:
    """Launches the buckets of one plan."""

    def __init__(self, context: ReduceContext, bucket_set: BucketSet) -> None:
        self.buckets = bucket_set.buckets
        self._layout = bucket_set.layout
        self._device = bucket_set.plan.buckets[0].device
        self._transport = context.transport
        self._policy = context.policy
        self._usage = context.usage
        self._clock = context.clock
        self._registered = context.registered
        self._shards = context.shards
        self._hook_futures = context.peers.hook_futures()
        self._lone_control: torch.Tensor | None = None
        self._control_reduction: Reduction | None = None
        self.launched = 0

    def close(self) -> None:
        """Let go of everything that is in flight or done."""
        self._registered.futures = []
        self._forget_reductions()

    def open(self) -> None:
        """Begin a step with no bucket launched."""
        self.launched = 0
        self._hook_futures.begin()
        self._forget_reductions()

    def _forget_reductions(self) -> None:
        self._control_reduction = None
        for bucket in self.buckets:
            bucket.reduction = bucket.future = None

    def next_bucket(self) -> Bucket | None:
        """Return the bucket whose turn it is, if one is left."""
        return self.buckets[self.launched] if self.launched < len(self.buckets) else None

    def launch_full(self, step: Step) -> None:
        """Launch every bucket whose turn it is and which is full."""
        while (bucket := self.next_bucket()) is not None and bucket.pending == 0:
            self.launched += 1
            self.launch(step, bucket)

    def launch(self, step: Step, bucket: Bucket) -> None:
        """Launch one bucket, with the control block if it is the last."""
        self._clock.began[bucket.index] = time.perf_counter_ns()
        is_last = bucket.index == len(self.buckets) - 1
        skipped = self.is_skipped(bucket)
        if self._shards is not None:
            self._join_shards(self._shards, step, bucket)
        if self._registered.hook is not None:
            if not skipped:
                self._start_hook(self._registered.hook, step, bucket, is_last)
            return
        rides = is_last and not bucket.sparse and not skipped
        if rides:
            assert bucket.trailer is not None
            self._write_control(step, bucket.trailer)
        if not skipped:
            self._reduce(step, bucket)
        if is_last and not rides:
            self._start_lone_control(step)

    def _join_shards(self, shards: ShardSums, step: Step, bucket: Bucket) -> None:
        """Before the control block is written, which tells of all shards of this rank."""
        if bucket.index == 0:
            shards.tell(step, [slot for each in self.buckets for slot in each.slots])
        shards.join(step, bucket)

    def is_skipped(self, bucket: Bucket) -> bool:
        """With ``skip_all_reduce_unused_params``: nothing in this bucket is used, on any rank."""
        return self._policy.skip_unused and bucket.is_unused

    def _reduce(self, step: Step, bucket: Bucket) -> None:
        is_last = bucket is self.buckets[-1]
        try:
            if self._shards is not None:
                bucket.reduction = self._shards.start(self._transport, bucket, is_last=is_last)
            elif bucket.sparse:
                rows = self._registered.sparse_rows.get(bucket.slots[0].spec.name)
                bucket.reduction = start_sparse(bucket, self._transport, rows)
            else:
                assert bucket.flat is not None
                start = self._transport.start_last if is_last else self._transport.start
                bucket.reduction = start(bucket.flat)
        except RuntimeError as error:
            raise self._error(step, f"all_reduce of bucket {bucket.index}", error) from error
        if not is_last:
            # The last one is waited for anyway, and a callback would take the GIL from that wait.
            bucket.reduction.on_done(_stamp(self._clock.ended, bucket.index))

    def _start_hook(self, hook: RegisteredHook, step: Step, bucket: Bucket, is_last: bool) -> None:
        started = hook.collectives_started()
        try:
            future = hook.run(bucket, is_last=is_last)
        except Exception as error:
            step.fail(FailureKind.HOOK, bucket.slots, f"{type(error).__name__}: {error}")
            step.is_cut_off |= hook.collectives_started() == started
            return
        try:
            bucket.future = check_future(future, hook.name)
        except TypeError as error:
            step.fail(FailureKind.HOOK, bucket.slots, str(error))

    # --- the control block ---------------------------------------------------------------------

    def _write_control(self, step: Step, trailer: torch.Tensor) -> None:
        if step.joined:
            trailer.zero_()
            return
        flags = _PRESENT
        if step.weight is not None:
            flags |= Flag.WEIGHTED.value
        if step.failure is not None:
            is_nonfinite = step.failure.kind is FailureKind.NONFINITE
            skips = is_nonfinite and self._policy.nonfinite is NonFinite.SKIP
            flags |= (Flag.NONFINITE if skips else Flag.FAILED).value
        origin = self._clock.step_ended or self._clock.backward_began
        ready = tuple((stamp - origin) // 1000 for stamp in self._clock.ready)
        row = ControlRow(flags, step.number, step.weight or 0.0, ready, step.drift, step.digest)
        used = self._usage.flags if self._policy.tracks_unused else b""
        self._layout.write(trailer, self._transport.rank, row, used)

    def _start_lone_control(self, step: Step) -> None:
        """Send the control block by itself, where no bucket can carry it."""
        if self._lone_control is None:
            self._lone_control = self._transport.allocate(
                self._layout.numel, torch.float32, self._device
            )
        self._write_control(step, self._lone_control)
        self._control_reduction = self._transport.start(self._lone_control)

    def _read_control(self, step: Step) -> ControlBlock:
        if self._registered.hook is not None:
            # Only now: a hook may start further collectives from its callbacks, at any time.
            self._start_lone_control(step)
        if self._control_reduction is not None:
            self._control_reduction.wait()
            assert self._lone_control is not None
            return self._layout.read(self._lone_control)
        trailer = self.buckets[-1].trailer
        assert trailer is not None
        return self._layout.read(trailer)

    # --- waiting -------------------------------------------------------------------------------

    def wait_all(self, step: Step) -> ControlBlock:
        """Wait for every bucket and for the control block.

        Raises:
            CollectiveError: If the group fails.
        """
        operation = ""
        try:
            for bucket in self.buckets:
                operation = f"all_reduce of bucket {bucket.index}"
                self.wait(step, bucket)
            operation = "exchange of control blocks"
            block = self._read_control(step)
            operation = "a future of the buffer hook"
            for future in self._registered.futures:
                self._hook_futures.wait(future, operation)
        except (RuntimeError, TimeoutError) as error:
            raise self._error(step, operation, error) from error
        return block

    def wait(self, step: Step, bucket: Bucket) -> None:
        """Wait for one bucket; its gradients hold the result then."""
        future, bucket.future = bucket.future, None
        if future is None:
            if bucket.reduction is not None:
                bucket.reduction.wait()
            self._stamp_end(bucket)
            return
        hook = self._registered.hook
        assert hook is not None
        try:
            what = f"the future of hook {hook.name} for bucket {bucket.index}"
            self._hook_futures.wait(future, what)
            bucket.accept(hook_result(future, bucket, hook.name))
        except PeerLostError:
            raise
        except Exception as error:
            step.fail(FailureKind.HOOK, bucket.slots, f"{type(error).__name__}: {error}")
        self._stamp_end(bucket)

    def is_reduced(self, bucket: Bucket) -> bool:
        """Say whether :meth:`wait` would return at once."""
        if bucket.future is not None:
            return bool(bucket.future.done())
        return bucket.reduction is not None and bucket.reduction.is_done()

    def _stamp_end(self, bucket: Bucket) -> None:
        if not self._clock.ended[bucket.index]:
            self._clock.ended[bucket.index] = time.perf_counter_ns()

    def _error(self, step: Step, operation: str, cause: BaseException) -> CollectiveError:
        rank = self._transport.rank
        if isinstance(cause, CollectiveError):  # knows already what happened
            return cause.inside(f"{operation} in step {step.number}")
        return CollectiveError(
            f"Rank {rank}: {operation} over {self._transport.name} failed in step {step.number}: "
            f"{cause}\nA peer has probably died, or is in another collective. Look at the logs of "
            "the other ranks; the group cannot be used further.",
            operation=operation,
        )


def _stamp(stamps: list[int], index: int) -> Callable[[int], None]:
    def stamp(done_ns: int) -> None:
        stamps[index] = done_ns

    return stamp
